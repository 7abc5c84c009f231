"""Make a profile that ships with the package out of those of several models, measured over one link.

    python scripts/ship_profile.py OUT/*-staged-2/profile.json --name nvidia-h200-staged
    python scripts/ship_profile.py OUT/*-staged-2/profile.json --name nvidia-h200-staged --write disco_hlo/data/profiles

Without --write it only looks: what the profiles say together, how well the all-reduce lines fit, and of each model
whose module lies beside its profile how many ops the result knows under today's cost keys. It refuses to write
a profile that knows too few, whose lines fit badly, or in which nothing tells how compute and transfers slow
each other.

Exit status: 0 fine, 1 a check failed, 2 bad arguments or files.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from checkout import find_package

find_package()

from disco_hlo.errors import DiscoError  # noqa: E402
from disco_hlo.hlo.canonical import canonicalize  # noqa: E402
from disco_hlo.hlo.graph import Kind  # noqa: E402
from disco_hlo.hlo.opcodes import COLLECTIVES  # noqa: E402
from disco_hlo.plan.read import read  # noqa: E402
from disco_hlo.plan.units import unit_graph  # noqa: E402
from disco_hlo.printable import counted  # noqa: E402
from disco_hlo.profiler.keys import kernel_keys  # noqa: E402
from disco_hlo.profiler.profile import (  # noqa: E402
    Contention,
    Profile,
    load,
    merge,
    save,
)
from disco_hlo.report.bundle import read_module  # noqa: E402

MODULE = "module.hlo.pb.gz"
LEAST_KNOWN = 0.8
"""Of a step's single ops, and of XLA's kernels."""
LARGEST_RESIDUAL = 0.25
"""The median one of the all-reduce lines."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 where it is wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("profiles", nargs="+", type=Path, metavar="PROFILE.json")
    parser.add_argument("--name", required=True, help="such as nvidia-h200-staged")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write NAME.json there")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", args.name):
        parser.error(f"--name {args.name!r}: expected lower-case words joined by dashes")
    return args


def known_shares(profile: Profile, module: bytes) -> tuple[float, float]:
    """Which share of a step's single ops, and of XLA's kernels, the profile has under today's keys."""
    source = canonicalize(module)
    graph = source.graph
    singles = [
        node.key in profile.ops
        for node in graph.nodes
        if node.kind in (Kind.FUSIBLE, Kind.FIXED) and node.opcode not in COLLECTIVES
    ]
    kernels = [
        key in profile.ops for key in kernel_keys(graph, unit_graph(graph, read(source)).kernels(graph))
    ]
    return sum(singles) / max(1, len(singles)), sum(kernels) / max(1, len(kernels))


def check(profile: Profile, sources: list[Path]) -> list[str]:
    """Print what the profile says; returns what speaks against shipping it."""
    problems: list[str] = []
    print(f"{profile.platform}, link {profile.link}")
    print(f"{counted(len(profile.ops), 'op time')}, launch {profile.launch_ns} ns, noise {profile.noise:.3f}")
    fitted = profile.all_reduce
    if fitted is None:
        problems.append("there is no all-reduce sweep")
    else:
        for piece in fitted.line.lines:
            print(
                f"  all-reduce from {piece.from_bytes} B: {piece.ns_per_byte:.4f} ns/B + {piece.offset_ns:.0f} ns"
            )
        print(f"  residuals: median {fitted.median_error:.3f}, largest {fitted.maximum_error:.3f}")
        if fitted.median_error > LARGEST_RESIDUAL:
            problems.append(f"the all-reduce lines are off by {fitted.median_error:.2f}, median")
    slowed = profile.contention
    print(f"contention: {slowed}")
    if slowed in (None, Contention(1.0, 1.0)):
        problems.append("no profile tells how compute and transfers slow each other")
    for path in sources:
        problems += _lacks(profile, path.with_name(MODULE))
    return problems


def _lacks(profile: Profile, path: Path) -> list[str]:
    if not path.exists():
        return []
    singles, kernels = known_shares(profile, read_module(path))
    name, low = path.parent.name, min(singles, kernels)
    print(f"{name}: {100 * singles:.0f} % of single ops, {100 * kernels:.0f} % of XLA's kernels known")
    expected = f"{name}: {100 * low:.0f} % known, expected {100 * LEAST_KNOWN:.0f}"
    return [expected] if low < LEAST_KNOWN else []


def main(argv: list[str] | None = None) -> int:
    """Merge, check, write."""
    args = arguments(argv)
    try:
        profile = merge([load(path) for path in args.profiles])
        problems = check(profile, args.profiles)
        for problem in problems:
            print(f"ship_profile.py: {problem}", file=sys.stderr)
        if problems:
            return 1
        if args.write is not None:
            save(profile, args.write / f"{args.name}.json")
            print(f"written: {args.write / args.name}.json")
    except (DiscoError, OSError) as error:
        print(f"ship_profile.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
