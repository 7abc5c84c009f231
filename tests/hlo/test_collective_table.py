"""A collective is one line of the table: it is read, ordered, bucketed, costed, written, checked and shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LAST = '    "reduce-scatter": Collective(travels=True, reduces=True),\n'
MADE_UP = {
    "like an all-reduce": (
        '    "all-mean": Collective(travels=True, concatenates=True, in_place=True, reduces=True, ring_share=1.0),\n',
        "concat",
        1.0,
    ),
    "like a reduce-scatter": ('    "all-mean": Collective(travels=True, reduces=True),\n', "variadic", 0.5),
}
STEP = """
import gzip, importlib.util, sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

last, line, form, share, backend, folder = sys.argv[1:]
spec = importlib.util.find_spec("disco_hlo.hlo.opcodes")
text = Path(spec.origin).read_text()
assert text.count(last) == 1
opcodes = sys.modules[spec.name] = ModuleType(spec.name)
exec(compile(text.replace(last, last + line), spec.origin, "exec"), opcodes.__dict__)

from disco_hlo.cli import main
from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.collectives import collective_kind
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.optimize.costs import costs_of
from disco_hlo.plan.apply import apply
from disco_hlo.plan.check_module import faults
from disco_hlo.plan.legal import bucket_of
from disco_hlo.plan.legal import check_order
from disco_hlo.plan.plan import decode
from disco_hlo.plan.read import read
from disco_hlo.plan.plan import Bucket
from disco_hlo.plan.units import unit_graph
from disco_hlo.profiler.collectives import AllReduceFit
from disco_hlo.profiler.profile import Collectives, to_json
from tests.captured import stored
from tests.report import plans

own = canonicalize(stored("h200_models/rnnlm") if backend == "gpu" else plans.cpu_module())
one_by_one = tuple(Bucket((node,)) for node in own.graph.all_reduces)
message = proto.parse(apply(replace(read(own), buckets=one_by_one, order=()), own))
for computation in message.computations:
    for instruction in computation.instructions:
        if instruction.opcode == "all-reduce":
            instruction.opcode = "all-mean"
module = proto.serialize(message)

source = canonicalize(module)
graph = source.graph
print("read:", len(graph.all_reduces) == len(own.graph.all_reduces) > 2)
print("its kind:", {graph.nodes[node].opcode for node in graph.all_reduces} == {"all-mean"})

measured = plans.sockets_profile()
profile = replace(measured, platform=replace(measured.platform, backend=backend))
kind = collective_kind(graph.nodes[graph.all_reduces[0]])
by_ring = profile.line(kind)
ring, equal = by_ring([1 << 20])[0], profile.transfers([round(float(share) * 2**20)])[0]
print("costed like a share of an all-reduce:", ring == equal)
own_line = LinearPieces.of((0, 0.5, 700_000.0))
swept = replace(profile, collectives={str(kind): Collectives(AllReduceFit(own_line, (), 0.0, 0.0))})
costs = costs_of(swept, source, [read(source)])
print("costed by its own line:", costs.collective(kind)([4096])[0] == own_line([4096])[0])

folder = Path(folder)
(folder / "step.hlo.pb.gz").write_bytes(gzip.compress(module))
(folder / "profile.json").write_text(to_json(swept))
asked = ["disco", "search", folder / "step.hlo.pb.gz", "--profile", folder / "profile.json"]
for command in ([*asked, "-o", folder / "found", "--evaluations", 100], ["disco", "inspect", folder / "found"]):
    sys.argv = [str(word) for word in command]
    with suppress(SystemExit):
        main.main()

plan = decode((folder / "found" / "plan.json").read_bytes(), "plan.json").strategy
several = [bucket for bucket in plan.buckets if len(bucket.all_reduces) > 1]
print("bucketed:", bool(several) and bucket_of(graph, several[0].all_reduces).form == form)
check_order(unit_graph(graph, plan), plan.order, costs.machine.asynchronous)
written = apply(plan, source)
print("written and read back:", read(canonicalize(written)).buckets == plan.buckets)
print("checked:", faults(written, backend) == [])
"""


@pytest.mark.parametrize(
    ("backend", "like"), [("gpu", "like an all-reduce"), ("cpu", "like a reduce-scatter")]
)
def test_a_made_up_collective_is_one_line(like: str, backend: str, tmp_path: Path) -> None:
    """Its operands, groups, share of a ring, form in a bucket and aliasing were told by name in eight files."""
    line, form, share = MADE_UP[like]
    done = subprocess.run(
        [sys.executable, "-c", STEP, LAST, line, form, str(share), backend, str(tmp_path)],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    lines, said = done.stdout.splitlines(), done.stdout + done.stderr
    assert lines[:4] == [
        "read: True", "its kind: True", "costed like a share of an all-reduce: True", "costed by its own line: True",
    ], said  # fmt: skip
    assert any("all-mean" in one for one in lines[4:-3]), said
    assert lines[-3:] == ["bucketed: True", "written and read back: True", "checked: True"], said
