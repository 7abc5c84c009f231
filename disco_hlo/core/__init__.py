"""What Python and the compiled search both go by: the rules of which nodes may share a kernel, and what these read."""
