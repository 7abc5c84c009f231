"""What a rule finds of a step's parameters, by the names of the arguments."""

from __future__ import annotations

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plugin.xla import compiles
from tests.steps import models
from tests.steps.intercept import intercept


def named_parameters(step: models.Step) -> tuple[CanonicalModule, dict[int, str]]:
    """A step as XLA compiles it, and the names of its arguments by the numbers of its parameters."""
    source = canonicalize(intercept(*step, compiles.capture))
    pairs = zip(source.graph.nodes, source.protos, strict=True)
    names = {proto.parameter_number: node.op_name for node, proto in pairs if node.opcode == "parameter"}
    return source, names
