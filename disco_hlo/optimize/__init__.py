"""From a step and its costs to plans worth measuring: what plugin, command line and benchmarks all run."""
