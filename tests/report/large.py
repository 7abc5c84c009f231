"""A module of any size: the H200 step several times over, each on parameters of its own."""

from __future__ import annotations

from disco_hlo.hlo import proto
from tests.report import plans


def repeated_step(copies: int) -> bytes:
    """``copies`` independent H200 steps, one after the other, in one module."""
    module = proto.parse(plans.h200_module())
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    originals = [i for i in entry.instructions if i.id != entry.root_id]
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    results, shapes = list(root.operand_ids), list(root.shape.tuple_shapes)
    parameters = sum(instruction.opcode == "parameter" for instruction in originals)
    step = 1 + max(i.id for computation in module.computations for i in computation.instructions)
    scheduled = [i for i in module.schedule.sequences[entry.id].instruction_ids if i != root.id]
    copied = []
    for number in range(1, copies):
        shift = number * step
        for original in originals:
            made = type(original)()
            made.CopyFrom(original)
            made.id += shift
            made.name += f".copy{number}"
            made.operand_ids[:] = [i + shift for i in original.operand_ids]
            made.control_predecessor_ids[:] = [i + shift for i in original.control_predecessor_ids]
            if original.opcode == "parameter":
                made.parameter_number += number * parameters
            copied.append(made)
        root.operand_ids.extend(i + shift for i in results)
        root.shape.tuple_shapes.extend(shapes)
        module.schedule.sequences[entry.id].instruction_ids[:] = [
            i + n * step for n in range(number + 1) for i in scheduled
        ] + [root.id]
    last = type(root)()
    last.CopyFrom(root)
    del entry.instructions[:]
    entry.instructions.extend([*originals, *copied, last])
    data: bytes = module.SerializeToString()
    return data
