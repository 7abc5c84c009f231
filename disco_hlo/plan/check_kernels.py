"""Whether a kernel or library call may write a result over an operand that it reads.

Part of :mod:`~disco_hlo.plan.check_module`.
"""

from __future__ import annotations

from collections.abc import Mapping

from disco_hlo.hlo.proto import Message
from disco_hlo.plan.check_pairs import Body, fused
from disco_hlo.plan.check_reads import ELEMENTWISE, FusedReads, lies_alike
from disco_hlo.plan.check_values import Step, Values


class Kernels:
    """The kernels of a module."""

    def __init__(self, values: Values, bodies: Mapping[int, Body], *, gpu: bool) -> None:
        self._values, self._bodies, self._gpu = values, bodies, gpu
        self._reads: dict[int, FusedReads] = {}

    @staticmethod
    def has(instruction: Message) -> bool:
        """Whether XLA emits an instruction as a kernel, and not as a call of a library."""
        return instruction.opcode == "fusion" or instruction.opcode in ELEMENTWISE

    def reads_what_it_writes(self, step: Step, place: int, leaf: int, result: int) -> bool:
        """Whether one array that ``step`` reads is read only where, and before, a result is written."""
        instruction = step.instruction
        opcode = instruction.opcode
        declared = any(
            p.operand == place and p.operand_leaf == leaf and p.result_leaf == result for p in step.pairs
        )
        if opcode == "fusion":
            if declared and instruction.output_operand_aliasing:
                return True
            body = fused(instruction, self._bodies)
            key = instruction.called_computation_ids[0]
            if key not in self._reads:
                self._reads[key] = FusedReads(body, self._bodies, gpu=self._gpu)
            return place not in self._reads[key].elsewhere(result)
        if declared:
            return True
        if opcode in ELEMENTWISE:
            shape = self._values.shapes
            return lies_alike(shape[step.operands[place][leaf]], shape[step.results[result]])
        return _works_in_place(instruction, place, result, gpu=self._gpu)


def _works_in_place(instruction: Message, place: int, result: int, *, gpu: bool) -> bool:
    """Whether a library call or collective may write a result over an operand (XLA's ``MayAlias``)."""
    opcode = instruction.opcode
    if opcode in ("all-reduce", "collective-broadcast"):
        return gpu and place == result
    if opcode == "sort":
        return place == result
    if opcode == "triangular-solve":
        return place == 1
    if opcode == "custom-call" and gpu:
        target = instruction.custom_call_target
        if target == "__cublas$lt$matmul":
            return place == 2 and result == 0
        return target == "cusolver$cholesky" and result == 0
    return False
