"""The step and the strategy as flat arrays that compiled code changes in place, and can change back."""
