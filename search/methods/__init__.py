"""How the search goes: Algorithm 1 of the paper, and the joint search."""
