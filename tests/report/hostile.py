"""A step whose names try to break out of wherever they are shown."""

from __future__ import annotations

from pathlib import Path

from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import canonicalize
from tests.report import plans

NAMES = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\"'`&lt;{{7*7}}]]>-->",
    "\x1b[2J\x1b]0;owned\x07 \u202egnp.exe\r\n\t\x00",
    "z" * 10_000,
)


def hostile_module() -> bytes:
    """The small step with every metadata string and instruction name replaced by one of ``NAMES``."""
    module = proto.parse(plans.cpu_module())
    module.name = "jit_" + NAMES[0]
    for computation in module.computations:
        for number, instruction in enumerate(computation.instructions):
            name = NAMES[number % len(NAMES)]
            instruction.name = f"{name}{instruction.id}"
            instruction.metadata.op_name = name
            instruction.metadata.source_file = name
            instruction.metadata.source_line = number
            instruction.metadata.ClearField("stack_frame_id")
    data: bytes = module.SerializeToString()
    return data


def hostile_plan(folder: Path) -> Path:
    """A plan folder of that step."""
    data = hostile_module()
    source = canonicalize(data)
    return plans.save_plan(folder, source, data, plans.early_collectives(source))
