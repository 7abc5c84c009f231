"""Between Python and the arrays: strategies become states and states strategies, and the cost model is asked."""
