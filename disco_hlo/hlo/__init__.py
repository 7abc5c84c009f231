"""The training step as a graph: HLO modules, canonical form, digests, buffers, and what is asked of times."""
