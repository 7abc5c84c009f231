"""Where the time of a cell's rows goes: what kernels lost beside transfers, and what transfers waited for.

    python scripts/explain_cell.py gpt12 --link nvlink --out DIR
    python scripts/explain_cell.py gpt12 --link nvlink --out DIR --row plan

DIR is what scripts/benchmark.py wrote, which keeps the traces of XLA's default, of the same kernels with nothing beside
their transfers, of the plan, of its order alone, of what the tool chose and of the profile. Kernels that ran with
nothing beside transfers, too, are held against themselves; of every row it says what its transfers waited for. Needs no
device.

Exit status 2: bad arguments, or nothing kept of that cell.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmark import MODELS
from checkout import find_package
from evaluation import commands
from evaluation.links import LINKS


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 where it is wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--link", choices=list(LINKS), required=True)
    parser.add_argument("--devices", type=int, choices=range(1, 65), default=2, metavar="N")
    parser.add_argument("--size", default="full", choices=("full", "tiny"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--row", action="append", help="only this row; may be given several times")
    return parser.parse_args(argv)


def main() -> int:
    """Print what the traces of one cell show."""
    args = arguments()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    find_package()
    from evaluation.explaining import explained
    from evaluation.record import CellName

    from disco_hlo.errors import DiscoError

    try:
        print(explained(args.out, CellName(args.model, args.size, args.link, args.devices), args.row), end="")
    except DiscoError as error:
        print(f"explain_cell.py: {error}", file=sys.stderr)
        return commands.BAD_ARGUMENTS
    return commands.DONE


if __name__ == "__main__":
    raise SystemExit(main())
