"""Whether a kernel or library call may write a result over an operand that it reads.

Part of :mod:`~disco_hlo.plan.check_module`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from disco_hlo.backends import Backend
from disco_hlo.hlo.opcodes import COLLECTIVE
from disco_hlo.hlo.proto import Message
from disco_hlo.plan.check_pairs import Body, behind, fused, leaves
from disco_hlo.plan.check_reads import ELEMENTWISE, FusedReads, lies_alike
from disco_hlo.plan.check_values import NOTHING, Step, Values


class Kernels:
    """The kernels of a module."""

    def __init__(self, values: Values, bodies: Mapping[int, Body], backend: Backend) -> None:
        self._values, self._bodies, self._backend = values, bodies, backend
        self._reads: dict[int, FusedReads] = {}

    def may_write_over(self, step: Step, places: Sequence[tuple[int, int]], result: int, body: Body) -> bool:
        """Whether XLA may put a result over an array that is read at several places, and that would be wrong.

        It looks at the first place of each name that the array has, and of names that differ by bitcasts at one alone.
        Kernels write over what they read at one place element by element, library calls and collectives over
        particular operands. A sort has copied each operand to its result before it begins.
        """
        opcode = step.instruction.opcode
        if opcode == "sort":
            return False
        fits = [self.reads_what_it_writes(step, place, leaf, result, body) for place, leaf in places]
        if all(fits):
            return False
        if opcode != "fusion":
            return opcode in ELEMENTWISE or any(fits)
        reads = self._fused_reads(step.instruction)
        numbers = step.instruction.operand_ids
        first = {numbers[place]: (place, leaf) for place, leaf in reversed(places)}
        shared = [
            self._has_the_form(step, *at, result, body) and reads.may_be_shared(at[0])
            for at in first.values()
        ]
        homes = {
            (home[0].id, home[1]) if home is not None and home[0].opcode != "bitcast" else None
            for home in (behind(body, body.by_id[name], at[1], "opt-barrier") for name, at in first.items())
        }
        is_seen = len(homes) == 1 and None not in homes
        return all(shared) if is_seen else any(shared)

    def _has_the_form(self, step: Step, place: int, leaf: int, result: int, body: Body) -> bool:
        """Whether XLA may give a kernel's result the buffer of an array of this form: XLA:CPU where type and layout are
        the result's, XLA:GPU also where only the size is."""
        read = list(leaves(body.by_id[step.instruction.operand_ids[place]].shape))[leaf]
        written = self._values.shapes[step.results[result]]
        return self._backend.shares_by_size or bool(
            read.element_type == written.element_type and lies_alike(read, written)
        )

    def _fused_reads(self, fusion: Message) -> FusedReads:
        kernel = fused(fusion, self._bodies)
        key = fusion.called_computation_ids[0]
        if key not in self._reads:
            self._reads[key] = FusedReads(kernel, self._bodies, self._backend)
        return self._reads[key]

    def reads_what_it_writes(self, step: Step, place: int, leaf: int, result: int, body: Body) -> bool:
        """Whether one array that ``step`` reads is read only where, and before, a result is written.

        Args:
            place: of the operand.
            leaf: of the array in it.
            body: where the step stands.
        """
        instruction = step.instruction
        opcode = instruction.opcode
        if sources := self._sorted(step):
            return sources[result] == self._values.itself(step.operands[place][leaf])
        wanted = (place, leaf, result)
        if any(one[:3] == wanted and (one.is_declared or opcode != "fusion") for one in step.pairs):
            return True
        if opcode == "fusion":
            return place not in self._fused_reads(instruction).elsewhere(result)
        if opcode in ELEMENTWISE:
            read = list(leaves(body.by_id[instruction.operand_ids[place]].shape))[leaf]
            return lies_alike(read, self._values.shapes[step.results[result]])
        return _works_in_place(instruction, place, result, self._backend)

    def _sorted(self, step: Step) -> list[int]:
        """Of a sort, alone or in a kernel of its own, the value that each result holds in another order; empty for what
        is no sort. XLA copies each operand to its result, in turn, but for what lies there already; then it sorts."""
        values = [self._values.itself(operand[0]) if operand else NOTHING for operand in step.operands]
        if step.instruction.opcode == "sort":
            return values
        body = fused(step.instruction, self._bodies) if step.instruction.opcode == "fusion" else None
        if body is None or body.root.opcode != "sort":
            return []
        read = [body.by_id[one] for one in body.root.operand_ids]
        if not all(one.opcode in ("parameter", "iota") for one in read):
            return []
        return [values[one.parameter_number] if one.opcode == "parameter" else NOTHING for one in read]


def _works_in_place(instruction: Message, place: int, result: int, backend: Backend) -> bool:
    """Whether a library call or collective may write a result over an operand (XLA's ``MayAlias``)."""
    opcode = instruction.opcode
    if opcode in COLLECTIVE and COLLECTIVE[opcode].in_place:
        return backend.reduces_in_place and place == result
    if opcode == "triangular-solve":
        return place == 1
    if opcode == "custom-call":
        target = instruction.custom_call_target
        if target == "__cublas$lt$matmul":
            return place == 2 and result == 0 and _adds_to_operand(instruction)
        return target == "cusolver$cholesky" and result == 0
    return False


def _adds_to_operand(matmul: Message) -> bool:
    """Whether a cuBLASLt call adds its third operand to the product (beta), and so may write over it."""
    try:
        config = json.loads(matmul.backend_config)
        return bool(config["gemm_backend_config"]["beta"] != 0)
    except (ValueError, KeyError, TypeError):
        return False
