"""The search for a better strategy: Algorithm 1 of the paper, and the search around it."""
