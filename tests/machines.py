"""The machines of the two backends, by name."""

from disco_hlo.simulator.costs import MACHINES

CPU, GPU = MACHINES["cpu"], MACHINES["gpu"]
