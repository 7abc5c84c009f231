"""A loop written out: its turns one behind the other, in the computation that held it.

Not in the papers, whose steps are unrolled. The layers of a ``lax.scan`` hand what the backward pass reads through
arrays of all turns: a turn copies its part in, a turn of a later loop copies it out. Written out, every part is the
value itself, each layer has kernels, buckets and an order of its own, and its collectives may overlap with other
layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.keep import restore_order
from disco_hlo.structure.loops import Loop, behind_copies, constant, element, forget_state
from disco_hlo.structure.program import Buffers, Program, dims, evaluate, illegal, physical
from disco_hlo.structure.rotation import check_repeatable, written

_MOST_WRITTEN = 20_000
"""Instructions that a step may become: XLA:CPU compiles so many in about 20 s."""
_Part = tuple[tuple[int, int], ...]
"""Of an array, by dimension: from where, and how many."""


def unroll(loop: Loop) -> None:
    """Write all turns of a loop in its place, which is gone afterwards. What a later turn or loop takes out of an
    array at a place of its own it reads where that was put in. The module must hold what was written before.

    Raises:
        IllegalMoveError: a turn cannot be repeated, or the step would be too many instructions.
    """
    check_repeatable(loop, 1)
    caller = loop.caller
    many = sum(len(one.instructions) for one in caller.module.computations)
    many += (loop.turns - 1) * len(loop.body.instructions)
    if many > _MOST_WRITTEN:
        reason = f"written out, the step has {many} instructions, expected up to {_MOST_WRITTEN}"
        raise illegal(loop.instruction, reason)
    if any(map(loop.condition.acts, loop.condition.instructions)):
        raise illegal(loop.instruction, "its condition has effects")
    results, unordered = loop.results(), Buffers(caller).unordered()
    _write_turns(loop, results)
    caller.sweep()
    if loop.instruction.id in caller.by_id:
        raise illegal(loop.instruction, "something else than its results waits for it")
    _forget(loop)
    slices = _read_where_made(caller)
    caller.sweep()
    if caller.copies:
        restore_order(caller, unordered)
        caller.in_order()
    else:
        _slice_behind_barriers(caller, slices)


def _write_turns(loop: Loop, results: Mapping[int, list[Message]]) -> None:
    """Write the turns before the loop, and have its readers read the last of them."""
    caller, ends, unchanged = loop.caller, loop.ends, loop.unchanged()
    now = list(loop.begins)
    wanted = {k: end for k, end in enumerate(ends) if k != loop.counter and k not in unchanged}
    for turn in range(loop.turns + 1):
        at = caller.position(loop.instruction)
        count = constant(caller, now[loop.counter], loop.start + turn * loop.step)
        caller.place([count], at)
        now[loop.counter] = count
        if turn == loop.turns:
            if caller.copies:  # it may be returned or counted on, and a constant's buffer is everybody's
                now[loop.counter] = caller.make("copy", "counted", count.shape, [count])
                caller.place([now[loop.counter]], at + 1)
            break
        values = {i: now[k] for i, k in loop.elements.items()}
        found = written(caller, loop.body, values, list(wanted.values()), at + 1)
        for k, end in wanted.items():
            now[k] = found[end.id]
    for k, readers in results.items():
        for reader in readers:
            caller.redirect(reader, now[k])


def _forget(loop: Loop) -> None:
    """Remove the loop's computations from the module."""
    every, gone = loop.caller.module.computations, {*loop.instruction.called_computation_ids}
    for at in reversed([at for at, one in enumerate(every) if one.id in gone]):
        del every[at]


def _read_where_made(caller: Program) -> set[int]:
    """Let what is taken out of an array at a known place be the value that was put there, behind a barrier: XLA would
    take what a ``jax.checkpoint`` computes again for what it computed first. The rest is a plain slice, whose ids are
    returned."""
    known: dict[int, NDArray[Any] | None] = {}
    buffers, slices, instead = Buffers(caller), set[int](), dict[int, Message]()
    found: list[tuple[int, Message, _Part, Message | None]] = []
    for at, taken in enumerate(caller.instructions):
        if taken.opcode != "dynamic-slice" or taken.control_predecessor_ids:
            continue
        part = _part(caller, taken, list(taken.dynamic_slice_sizes), known)
        if part is not None:
            put = _put(caller, caller.operands(taken)[0], part, known)
            stands = put is not None and _stands_for(buffers, put, taken)
            found.append((at, taken, part, put if stands else None))
    for placed, (at, taken, part, put) in enumerate(found):
        if put is not None:
            put = instead.get(put.id, put)
            made = caller.make("opt-barrier", f"{taken.name}.made", taken.shape, [put])
        else:
            made = caller.make("slice", taken.name, taken.shape, caller.operands(taken)[:1])
            for first, size in part:
                made.slice_dimensions.add(start=first, limit=first + size, stride=1)
            slices.add(made.id)
        caller.place([made], at + placed)
        caller.redirect(taken, made)
        instead[taken.id] = made
    return slices


def _stands_for(buffers: Buffers, put: Message, taken: Message) -> bool:
    """Whether a value can be read in the place of the slice that it was put into: as that lies in memory, and where
    nothing writes over it before."""
    if put.shape.element_type != taken.shape.element_type or physical(put.shape) != physical(taken.shape):
        return False
    try:
        for reader in buffers.readers(taken) if buffers.program.copies else ():
            buffers.check_read(put, reader)
    except IllegalMoveError:
        return False
    return True


def _slice_behind_barriers(caller: Program, slices: Collection[int]) -> None:
    """Let an optimization barrier take whole arrays, which costs nothing, and what is behind it their slices, as part
    of the kernels that read them: what goes into a barrier is an array of its own. Only those slices of ids: of another
    the program may need the whole no longer."""
    for barrier in [one for one in caller.instructions if one.opcode == "opt-barrier"]:
        before, takers = caller.operands(barrier)[0], caller.readers(barrier)
        is_root = caller.root in (before.id, barrier.id)
        if before.opcode != "tuple" or len(caller.readers(before)) != 1 or is_root:
            continue
        if any(one.opcode != "get-tuple-element" for one in takers):
            continue
        for number, value in enumerate(caller.operands(before)):
            chain = _sliced(caller, value, slices)
            if not chain:
                continue
            array = caller.operands(chain[0])[0]
            for one in (before, barrier):
                one.shape.tuple_shapes[number].CopyFrom(array.shape)
                forget_state(one)
            operands = list(before.operand_ids)
            operands[number] = array.id
            caller.reads(before, operands)
            for taker in [one for one in takers if one.tuple_index == number]:
                made = [element(caller, barrier, number)]
                for one in chain:
                    made.append(caller.copy(one, f"{one.name}.behind", made[-1:]))
                caller.place(made, caller.position(taker))
                caller.redirect(taker, made[-1])
        caller.sweep()


def _sliced(caller: Program, value: Message, slices: Collection[int]) -> list[Message]:
    """One of ``slices``, and what brings it into the shape of a value that only one instruction reads; none where the
    value is something else."""
    chain: list[Message] = []
    while value.opcode in ("slice", "reshape", "bitcast") and len(caller.readers(value)) == 1:
        chain.insert(0, value)
        value = caller.operands(value)[0]
        if chain[0].opcode == "slice":
            return chain if chain[0].id in slices else []
    return []


def _put(
    caller: Program, array: Message, part: _Part, known: dict[int, NDArray[Any] | None]
) -> Message | None:
    """What was put into an array at just this part, and not written over since; None where nobody knows."""
    while (array := behind_copies(caller, array)).opcode == "dynamic-update-slice":
        before, update = caller.operands(array)[:2]
        other = _part(caller, array, list(dims(update)), known)
        if other is None:
            return None
        if other == part:
            return update
        if all(a < b + n and b < a + m for (a, m), (b, n) in zip(part, other, strict=True)):
            return None
        array = before
    return None


def _part(
    caller: Program, one: Message, sizes: list[int], known: dict[int, NDArray[Any] | None]
) -> _Part | None:
    """Where a slice is taken or put, as XLA moves it into the array; None where that is not known."""
    is_update = one.opcode == "dynamic-update-slice"
    operands = caller.operands(one)
    array, starts = dims(operands[0]), operands[2 if is_update else 1 :]
    found = []
    if any(dims(start) for start in starts):  # all of them as one array
        return None
    for start, whole, size in zip(starts, array, sizes, strict=True):
        if start.id not in known:
            known[start.id] = evaluate(caller, start, known=known)
        value = known[start.id]
        if value is None:
            return None
        found.append((int(np.clip(int(value), 0, whole - size)), size))
    return tuple(found)
