"""The Transformers that T3 evaluates (table 2), and what T3 makes of a whole iteration (sections 5.1.2 and 6.3).

The paper scales the breakdown of a measured iteration by the speed-ups of its sub-layers. Here the breakdown is
computed: all matmuls of a layer by the same model as the sub-layers', the all-reduces, and the rest, which the paper
says is 40 to 45 % of the execution ("non-sliced attention operations").
"""

from __future__ import annotations

from dataclasses import dataclass

from disco_hlo.whatif.machine import Machine
from disco_hlo.whatif.matmul import Matmul, matmul_ns
from disco_hlo.whatif.t3 import Arbitration, SubLayer, sub_layer

FORWARD, BACKWARD = ("OP", "FC-2"), ("FC-1", "IP")
OTHER_SHARE = 0.425
"""T3, section 6.3: 40 to 45 %, the middle."""


@dataclass(frozen=True, slots=True)
class Model:
    """A row of table 2."""

    name: str
    width: int
    tokens: int
    """Sequence length times batch."""
    degrees: tuple[int, ...]
    """Devices that slice a layer."""


SMALLER = (Model("Mega-GPT-2", 3072, 16 * 1024, (8, 16)), Model("T-NLG", 4256, 8 * 1024, (8, 16)))
LARGER = (
    Model("GPT-3", 12 * 1024, 2 * 1024, (32,)),
    Model("PALM", 18 * 1024, 2 * 1024, (32,)),
    Model("MT-NLG", 20 * 1024, 2 * 1024, (32,)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One sub-layer of one model."""

    model: Model
    degree: int
    name: str
    result: SubLayer


def sliced(model: Model, name: str, degree: int) -> Matmul:
    """The matmul of a sub-layer on one of ``degree`` devices; its result is to be all-reduced."""
    depth = {"OP": 1, "IP": 3, "FC-2": 4, "FC-1": 4}[name] * model.width // degree
    return Matmul(model.tokens, model.width, depth)


def cases(machine: Machine, models: tuple[Model, ...], update_cost: float = 1.0) -> list[Case]:
    """All sub-layers of these models."""
    return [
        Case(model, degree, name, sub_layer(machine, sliced(model, name, degree), degree, update_cost))
        for model in models
        for degree in model.degrees
        for name in (*FORWARD, *BACKWARD)
    ]


def iteration_speed_up(
    machine: Machine,
    of_one: list[Case],
    arbitration: Arbitration,
    *,
    training: bool,
    other_share: float = OTHER_SHARE,
) -> float:
    """How much faster an iteration is, by the sub-layers of one model at one degree.

    Args:
        training: with the backward pass; else the prompt's alone.
    """
    model, degree = of_one[0].model, of_one[0].degree
    sub_layers = [one.result for one in of_one if training or one.name in FORWARD]
    sequential = sum(one.sequential_ns for one in sub_layers)
    saved = sequential - sum(one.t3_ns(arbitration) for one in sub_layers)
    total = (sequential + _other_matmuls_ns(machine, model, degree, training=training)) / (1 - other_share)
    return total / (total - saved)


def _other_matmuls_ns(machine: Machine, model: Model, degree: int, *, training: bool) -> float:
    """The matmuls of a layer that no all-reduce follows: IP and FC-1 forward; backward OP, FC-2 and all weights'."""
    wide = [model.width * many // degree for many in (3, 4)]
    found = [Matmul(model.tokens, columns, model.width) for columns in wide]
    if training:
        found += [Matmul(model.tokens, model.width * many // degree, model.width) for many in (1, 4)]
        found += [Matmul(model.width, model.width * many // degree, model.tokens) for many in (3, 1, 4, 4)]
    return sum(matmul_ns(machine.gpu, one) for one in found)
