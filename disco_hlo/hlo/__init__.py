"""The training step as a graph: reading HLO modules, canonical form, legality, verification."""
