"""HLO modules written as a few lines of text, so that a test shows the whole of what it checks.

:func:`module_of` takes HLO text. :func:`module` takes less, and what XLA would not parse: a computation is lines of
``name = shape opcode operands``, as in :mod:`tests.graphs` but for the names, in their schedule, the root last:

    x = f32[8] parameter
    y = f32[2,4]{0,1} bitcast x
    t = (f32[8],f32[2,4]) tuple x y

Parameters and members of tuples are numbered by ``number=``; ``calls=``, ``dims=``, ``aliases=result:operand`` and
``value=`` say the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from disco_hlo.hlo import proto
from disco_hlo.hlo.proto import Message
from disco_hlo.hlo.walks import reached
from tests.graphs import shape_of

ADD = """
add { a = f32[] parameter(0)
      b = f32[] parameter(1)
      ROOT s = f32[] add(a, b) }
"""
"""What a sum over devices applies."""


@cache
def _parser() -> Callable[[str], Any]:
    from jaxlib import _hlo

    return _hlo.hlo_module_from_text  # type: ignore[no-any-return]


def module_of(text: str, *, scheduled: bool = False) -> bytes:
    """A module written as HLO text, which may leave out its header; serialized."""
    if "HloModule" not in text:
        text = f"HloModule jit_step{', is_scheduled=true' * scheduled}\n{text}"
    return bytes(_parser()(text).as_serialized_hlo_module_proto())


def module(
    entry: str,
    called: Mapping[str, str] | None = None,
    aliases: Sequence[tuple[int, int]] = (),
    unscheduled: Sequence[str] = (),
) -> bytes:
    """A serialized module.

    Args:
        entry: the entry computation.
        called: the other computations, by name.
        aliases: (result, parameter) of donated arguments.
        unscheduled: names of computations that are left out of the schedule; those of fusions always are.
    """
    texts = {"entry": entry, **(called or {})}
    numbers = {name: number for number, name in enumerate(texts, 1)}
    message = proto.Module(name="jit_test", entry_computation_name="entry", entry_computation_id=1)
    fused: set[str] = set()
    for name, text in texts.items():
        _fill(message.computations.add(name=name, id=numbers[name]), text, numbers, fused)
    for computation in message.computations:
        if computation.name not in (*unscheduled, *fused):
            ids = [instruction.id for instruction in computation.instructions]
            message.schedule.sequences[computation.id].instruction_ids.extend(ids)
    for result, parameter in aliases:
        entry_ = message.input_output_alias.entries.add(parameter_number=parameter, kind=1)
        entry_.output_shape_index.extend([result] if len(aliases) > 1 or _is_tuple(message) else [])
    return proto.serialize(message)


def _is_tuple(message: Message) -> bool:
    return bool(message.computations[0].instructions[-1].opcode == "tuple")


def _fill(computation: Message, text: str, numbers: Mapping[str, int], fused: set[str]) -> None:
    ids: dict[str, int] = {}
    lines = [line for line in text.splitlines() if line.strip()]
    for place, line in enumerate(lines, 1):
        name, rest = (part.strip() for part in line.split("=", 1))
        shape, opcode, *words = rest.split()
        ids[name] = computation.id * 1000 + place
        instruction = computation.instructions.add(name=name, opcode=opcode, id=ids[name])
        instruction.shape.CopyFrom(proto.shape_to_proto(shape_of(shape)))
        said = dict(word.split("=") for word in words if "=" in word)
        instruction.operand_ids.extend(ids.get(word, 999) for word in words if "=" not in word)
        instruction.parameter_number = instruction.tuple_index = int(said.get("number", 0))
        called = said["calls"].split(",") if "calls" in said else []
        instruction.called_computation_ids.extend(numbers[one] for one in called)
        if opcode == "fusion":
            instruction.fusion_kind = said.get("kind", "kLoop")
            fused.update(called)
        instruction.dimensions.extend(map(int, said.get("dims", "").replace(",", " ").split()))
        instruction.custom_call_target = said.get("target", "")
        for start in said.get("starts", "").replace(",", " ").split():
            instruction.slice_dimensions.add(start=int(start), limit=int(start) + 1, stride=1)
        if "value" in said:
            literal = proto.DetailedInstruction()
            literal.literal.s32s.append(int(said["value"]))
            instruction.literal = literal.literal.SerializeToString()
        for pair in said.get("aliases", "").split():
            result, operand = pair.split(":")
            alias = instruction.output_operand_aliasing.add(operand_index=int(operand))
            alias.output_shape_index.extend(map(int, filter(None, result.split("."))))
    computation.root_id = ids[name]


def run_before(module: bytes, computation: str, moved: str, other: str) -> bytes:
    """``module`` with an instruction, and all that it waits for, right before another one at the latest."""
    message = proto.parse(module)
    body = next(one for one in message.computations if one.name == computation)
    by_id = {one.id: one for one in body.instructions}
    ids = {one.name: one.id for one in body.instructions}
    sequence = message.schedule.sequences[body.id].instruction_ids
    wanted = reached([ids[moved]], lambda i: by_id[i].operand_ids)
    place = list(sequence).index(ids[other])
    before, behind = sequence[:place], sequence[place:]
    sequence[:] = [
        *before,
        *(one for one in behind if one in wanted),
        *(one for one in behind if one not in wanted),
    ]
    return proto.serialize(message)
