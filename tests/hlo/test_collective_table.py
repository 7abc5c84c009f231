"""A collective is one line of the table: it is read, ordered and bucketed by both search methods, costed, simulated,
written, checked, shown, and followed through what decides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from disco_hlo.hlo import opcodes

ROOT = Path(__file__).parents[2]

LAST = '}\n"""By opcode. A new collective is one line."""\n'
MADE_UP = (
    # Its name, what the table says of it, the form of a bucket, its share of a ring, and where it is looked at.
    (
        "all-mean",
        "travels=True, shares=True, concatenates=True, in_place=True, reduces=True, alike=True, ring_share=1.0",
        "concat",
        1.0,
        "gpu",
    ),
    ("part-mean", "travels=True, shares=True, reduces=True, parted=True, along=True", "variadic", 0.5, "cpu"),
)
"""One like an all-reduce, one like a reduce-scatter."""
INSTEAD = """
import importlib.util, sys


class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "disco_hlo.hlo.opcodes":
            return importlib.util.spec_from_file_location(name, TABLE)


sys.meta_path.insert(0, Finder)
"""
"""What each process runs first: the table is another file, all else the package's, whose compiled code is kept."""
STEP = """
import gzip, json, sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from disco_hlo.cli import main
from disco_hlo.hlo import opcodes, proto
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.collectives import collective_bytes, collective_kind
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
from disco_hlo.plugin.measuring.inputs.decisions import EQUAL, Devices, collected, of_parameter
from disco_hlo.profiler.profile import Collectives, to_json
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import bucket_times
from tests.captured import stored
from tests.report import plans


place, made_up = Path(sys.argv[1]), json.loads(sys.argv[2])
assert Path(opcodes.__file__).is_relative_to(place), opcodes.__file__


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

    left = collected(Devices(1, 2), source.protos[graph.collectives[0]], [of_parameter(0)])
    print("known to leave the same or parts:", (left == EQUAL) == ("alike" in said))

    (folder / "step.hlo.pb.gz").write_bytes(gzip.compress(module))
    (folder / "profile.json").write_text(to_json(swept))
    asked = ["disco", "search", folder / "step.hlo.pb.gz", "--profile", folder / "profile.json", "--evaluations", 100]
    for method in ("joint", "backtracking"):
        found = folder / method
        for command in ([*asked, "--method", method, "-o", found], ["disco", "inspect", found]):
            sys.argv = [str(word) for word in command]
            with suppress(SystemExit):
                main.main()
        plan = decode((found / "plan.json").read_bytes(), "plan.json").strategy
        several = [bucket for bucket in plan.buckets if len(bucket.collectives) > 1]
        print("bucketed:", bool(several) and bucket_of(graph, several[0].collectives).form == form)
        check_order(unit_graph(graph, plan), plan.order, costs.machine.asynchronous)
        problem = build(graph, plan, costs, costs.machine).problem
        sizes = [[collective_bytes(graph, node) for node in one.collectives] for one in plan.buckets]
        line_ns = [
            bucket_times(own_line, costs.machine, of_one, packed_bytes=None, name="").main_ns for of_one in sizes
        ]
        took = sorted((problem.duration_ns[problem.communicates] * problem.unit_ns).tolist())
        print("simulated by its own line:", took == sorted(line_ns))
        written = apply(plan, source)
        print("written and read back:", read(canonicalize(written)).buckets == plan.buckets)
        print("checked:", faults(written, backend) == [])

for one in made_up:
    print("looking at", one[0])
    look(*one)
"""


def test_a_made_up_collective_is_one_line(tmp_path: Path) -> None:
    """Its operands, groups, share of a ring, form in a bucket and aliasing were told by name in eight files; then what
    it leaves on each device in six, where one like a reduce-scatter passed for one like an all-reduce."""
    table = Path(opcodes.__file__).read_text()
    assert table.count(LAST) == 1
    lines = "".join(f'    "{name}": Collective({facts}),\n' for name, facts, *_ in MADE_UP)
    (tmp_path / "opcodes.py").write_text(table.replace(LAST, lines + LAST))
    (tmp_path / "sitecustomize.py").write_text(INSTEAD.replace("TABLE", repr(str(tmp_path / "opcodes.py"))))
    done = subprocess.run(
        [sys.executable, "-P", "-c", STEP, str(tmp_path), json.dumps(MADE_UP)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    of_each = done.stdout.split("looking at ")[1:]
    assert len(of_each) == len(MADE_UP), said
    assert "ended early" not in said, said
    for (name, *_), found in zip(MADE_UP, of_each, strict=True):
        lines = found.splitlines()
        assert lines[:6] == [
            name, "read: True", "its kind: True", "costed like a share of an all-reduce: True",
            "costed by its own line: True", "known to leave the same or parts: True",
        ], said  # fmt: skip
        joint, backtracking = found.split("checked: True\n")[:-1]
        for by_method in (joint, backtracking):
            *shown, bucketed, simulated, written = by_method.splitlines()
            assert any(name in one for one in shown[6:]), said
            assert [bucketed, simulated, written] == [
                "bucketed: True", "simulated by its own line: True", "written and read back: True",
            ], said  # fmt: skip
