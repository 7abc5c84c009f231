"""A collective is one line of the table: it is read, ordered, bucketed, costed, written, checked and shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LAST = '    "reduce-scatter": Collective(travels=True, shares=True, reduces=True),\n'
MADE_UP = (
    # Its name, what the table says of it, the form of a bucket, its share of a ring, and where it is looked at.
    (
        "all-mean",
        "travels=True, shares=True, concatenates=True, in_place=True, reduces=True, ring_share=1.0",
        "concat",
        1.0,
        "gpu",
    ),
    ("part-mean", "travels=True, shares=True, reduces=True", "variadic", 0.5, "cpu"),
)
"""One like an all-reduce, one like a reduce-scatter."""
STEP = """
import gzip, importlib.util, json, sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

last, made_up, place = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
spec = importlib.util.find_spec("disco_hlo.hlo.opcodes")
text = Path(spec.origin).read_text()
assert text.count(last) == 1
lines = "".join(f'    "{name}": Collective({said}),\\n' for name, said, *_ in made_up)
opcodes = sys.modules[spec.name] = ModuleType(spec.name)
exec(compile(text.replace(last, last + lines), spec.origin, "exec"), opcodes.__dict__)

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
from disco_hlo.profiler.collectives import CollectiveFit
from disco_hlo.profiler.profile import Collectives, to_json
from tests.captured import stored
from tests.report import plans


def look(name, said, form, share, backend):
    folder = place / name
    folder.mkdir()
    own = canonicalize(stored("h200_models/rnnlm") if backend == "gpu" else plans.cpu_module())
    one_by_one = tuple(Bucket((node,)) for node in own.graph.collectives)
    message = proto.parse(apply(replace(read(own), buckets=one_by_one, order=()), own))
    for computation in message.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "all-reduce":
                instruction.opcode = name
    module = proto.serialize(message)

    source = canonicalize(module)
    graph = source.graph
    print("read:", len(graph.collectives) == len(own.graph.collectives) > 2)
    print("its kind:", {graph.nodes[node].opcode for node in graph.collectives} == {name})

    measured = plans.sockets_profile()
    profile = replace(measured, platform=replace(measured.platform, backend=backend))
    kind = collective_kind(graph.nodes[graph.collectives[0]])
    by_ring = profile.line(kind)
    ring, equal = by_ring([1 << 20])[0], profile.transfers([round(float(share) * 2**20)])[0]
    print("costed like a share of an all-reduce:", ring == equal)
    own_line = LinearPieces.of((0, 0.5, 700_000.0))
    swept = replace(profile, collectives={str(kind): Collectives(CollectiveFit(own_line, (), 0.0, 0.0))})
    costs = costs_of(swept, source, [read(source)])
    print("costed by its own line:", costs.collective(kind)([4096])[0] == own_line([4096])[0])

    (folder / "step.hlo.pb.gz").write_bytes(gzip.compress(module))
    (folder / "profile.json").write_text(to_json(swept))
    asked = ["disco", "search", folder / "step.hlo.pb.gz", "--profile", folder / "profile.json"]
    asked += ["-o", folder / "found", "--evaluations", 100, "--seeds", 1]
    for command in (asked, ["disco", "inspect", folder / "found"]):
        sys.argv = [str(word) for word in command]
        with suppress(SystemExit):
            main.main()

    plan = decode((folder / "found" / "plan.json").read_bytes(), "plan.json").strategy
    several = [bucket for bucket in plan.buckets if len(bucket.collectives) > 1]
    print("bucketed:", bool(several) and bucket_of(graph, several[0].collectives).form == form)
    check_order(unit_graph(graph, plan), plan.order, costs.machine.asynchronous)
    written = apply(plan, source)
    print("written and read back:", read(canonicalize(written)).buckets == plan.buckets)
    print("checked:", faults(written, backend) == [])

for one in made_up:
    print("looking at", one[0])
    look(*one)
"""


def test_a_made_up_collective_is_one_line(tmp_path: Path) -> None:
    """Its operands, groups, share of a ring, form in a bucket and aliasing were told by name in eight files."""
    done = subprocess.run(
        [sys.executable, "-c", STEP, LAST, json.dumps(MADE_UP), str(tmp_path)],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    of_each = done.stdout.split("looking at ")[1:]
    assert len(of_each) == len(MADE_UP), said
    for (name, *_), found in zip(MADE_UP, of_each, strict=True):
        lines = found.splitlines()
        assert lines[:5] == [
            name, "read: True", "its kind: True", "costed like a share of an all-reduce: True",
            "costed by its own line: True",
        ], said  # fmt: skip
        assert any(name in one for one in lines[5:-3]), said
        assert lines[-3:] == ["bucketed: True", "written and read back: True", "checked: True"], said
