"""Orders that a test makes of a module's own."""

from __future__ import annotations

from disco_hlo.hlo import proto


def run_before(module: bytes, computation: str, moved: str, other: str) -> bytes:
    """``module`` with an instruction, and all that it waits for, right before another one at the latest."""
    message = proto.parse(module)
    body = next(one for one in message.computations if one.name == computation)
    by_id = {one.id: one for one in body.instructions}
    ids = {one.name: one.id for one in body.instructions}
    sequence = message.schedule.sequences[body.id].instruction_ids
    wanted: set[int] = set()
    pending = [ids[moved]]
    while pending:
        one = pending.pop()
        wanted.add(one)
        pending += by_id[one].operand_ids
    place = list(sequence).index(ids[other])
    before, behind = sequence[:place], sequence[place:]
    sequence[:] = [
        *before,
        *(one for one in behind if one in wanted),
        *(one for one in behind if one not in wanted),
    ]
    return proto.serialize(message)
