"""Time the fused kernels of disco_hlo/kernels against XLA's separate operations, on the GPUs of one process.

    python scripts/bench_kernels.py --out build/kernels --seconds 1500
    python scripts/bench_kernels.py --out build/kernels --table
    python scripts/bench_kernels.py --out build/kernels --choices --seconds 150

Every kernel over sizes of the papers' figures: the first points of its tuning range, then the best of them, the same
without communication-aware order, what it replaces, and its two limits (computing alone, communicating alone), in turn,
medians of 50. Then a profiler's trace of one program: which kernels ran, and how long on each device. Every measurement
is a row: one line here, one JSON object in OUT/rows.jsonl, which a later run goes on from. `--table` prints the rows as
Markdown.

Each kernel has a process of its own. If it says nothing for a minute it is killed, and what it tried becomes a row with
that reason: a kernel that waits for ever costs a minute, not the rest. A point that does not compile, or whose result
is wrong, is a row with the reason, too.

Times are those of one call among many in a loop of one program, each waiting for the one before: a program of many less
one of few, over the number between them, so that neither dispatch nor Python counts. Between two calls one element of
each argument is set by the result, since a compiler leaves out what it need not do again: all times have those few
microseconds in them. The same "without a loop" has each call as a kernel of its own, which XLA prepares on the host
before the program begins: that counts, too, where the host does not run ahead. The floor of all kernels that talk to
other devices is a row: one that only raises a flag on each and waits for theirs.

`--choices` asks whether the tool chooses rightly: fused and separate kernels of 20 sizes, one point each. Two sizes of
each kernel tell the line by which the others are foretold, as a plan's are (`disco_hlo/kernels/times.py`); what the
rule chooses stands beside what was faster.

`--interpret --tiny` tries everything on CPU devices, without times.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # behind what is installed, which alone is whole

from evaluation.tables import markdown  # noqa: E402

from disco_hlo.kernels.times import COLLECTIVE_OF, Limits, Size, fused_ns, is_faster, line  # noqa: E402
from disco_hlo.printable import counted  # noqa: E402

SILENCE_S = 60
MOST_STARTS = 5
"""How often a kernel is begun again after its process was killed."""
FUSED_KERNEL = "mosaic_gpu"
"""Part of a fused kernel's name in a trace."""

# (M, K of one device, N): rows of the whole result, what this device multiplies over, columns. The first is 4096 rows,
# columns and depth a GPU, on two of them.
MATMULS = (
    (8192, 4096, 4096),
    (4096, 4096, 4096),
    (16384, 4096, 4096),
    (8192, 7168, 8192),
    (2048, 4096, 4096),
)
VECTORS = (
    (8192, 4096),
    (16384, 8192),
    (32768, 4096),
    (65536, 4096),
    (16384, 4096),
    (8192, 8192),
    (65536, 8192),
)
# Samples of all devices, tables of one, rows in a bag, rows of a table.
BAGS = (
    (2048, 256, 10, 8192),
    (512, 256, 10, 8192),
    (1024, 256, 10, 8192),
    (2048, 64, 10, 8192),
    (1024, 128, 32, 8192),
)
# Rows and columns of what is summed.
NORMS = ((8192, 4096), (2048, 8192), (64, 8192))
ADAMS = tuple(1 << power for power in (22, 26, 24, 28))
SIZES: dict[str, Sequence[Any]] = {
    "floor": ((),),
    "matvec-all-reduce": VECTORS,
    "embedding-all-to-all": BAGS,
    "matmul-reduce-scatter": MATMULS,
    "adam": ADAMS,
    "lamb": ADAMS,
    "matmul-all-to-all": MATMULS,
    "all-reduce-norm": NORMS,
    "all-gather-matmul": MATMULS,
    "matmul-all-reduce": MATMULS,
}
CHOICES = "choices"
# Of each kernel the first two tell the line by which the others are foretold.
CHOSEN_MATMULS = (
    (1024, 2048, 2048),
    (16384, 4096, 4096),
    (8192, 4096, 4096),
    (4096, 2048, 2048),
    (8192, 1024, 8192),
)
CHOSEN: dict[str, Sequence[Any]] = {
    "all-gather-matmul": CHOSEN_MATMULS,
    "matmul-reduce-scatter": CHOSEN_MATMULS,
    "matmul-all-reduce": CHOSEN_MATMULS,
    "matvec-all-reduce": ((4096, 4096), (32768, 8192), (8192, 4096), (16384, 8192), (65536, 2048)),
}
TELL_LINES = 2
FUSED_ONES = set(SIZES) - {"floor"}
SMALL_MATMUL = ((512, 128, 256),)
TINY: dict[str, Sequence[Any]] = dict.fromkeys(SIZES, SMALL_MATMUL) | {
    "floor": ((),),
    "matvec-all-reduce": ((512, 256),),
    "embedding-all-to-all": ((4, 2, 5, 16),),
    "all-reduce-norm": ((8, 512),),
    "adam": (1 << 14,),
    "lamb": (1 << 14,),
}


def main() -> None:
    """Run every kernel in a process of its own, or be that process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the rows; a later run goes on from them"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the rows that are there, and measure nothing"
    )
    parser.add_argument("--choices", action="store_true", help="20 sizes: what is chosen, what is faster")
    parser.add_argument("--seconds", type=float, default=1500, help="for everything together")
    parser.add_argument("--kernels", nargs="+", choices=SIZES, default=list(SIZES), help="in this order")
    parser.add_argument("--devices", type=int, default=2, help="with --interpret; else all GPUs are used")
    parser.add_argument("--tiny", action="store_true", help="one small size and two points for each kernel")
    parser.add_argument("--interpret", action="store_true", help="on CPU devices, without times")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        import kernel_problems

        kernel_problems.measure(**json.loads(chosen.job), interpret=chosen.interpret)
        return
    record = Record(chosen.out / "rows.jsonl")
    if chosen.table:
        print(choices_table(record) if chosen.choices else table(record))
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    end = monotonic() + chosen.seconds
    if chosen.choices:
        run_kernel(chosen, record, CHOICES, sizes_to_choose(chosen), end)
        print(choices_table(record))
        return
    sizes = TINY if chosen.tiny else SIZES
    for index, kernel in enumerate(chosen.kernels):
        share = (end - monotonic()) / (len(chosen.kernels) - index)
        if share <= 0:
            print(f"{kernel}: no time left; the same command goes on from here")
            break
        run_kernel(chosen, record, kernel, sizes[kernel], monotonic() + share)
    print(f"{counted(len(record.rows), 'row')} in {record.path}")


# --- the parent: processes, rows, the watchdog ---


class Record:
    """The rows so far, in memory and in a file of one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def has(self, kernel: str, size: Any, kind: str) -> bool:
        """Whether there is such a row."""
        return bool(self.of(kernel, size, kind))

    def of(self, kernel: str, size: Any, kind: str) -> list[dict[str, Any]]:
        """Rows of one kernel and size; tuples have become lists in the file."""
        size = json.loads(json.dumps(size))
        return [r for r in self.rows if (r["kernel"], r["size"], r["kind"]) == (kernel, size, kind)]

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, and show it."""
        row = json.loads(json.dumps(row))
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(line_of(row), flush=True)


def line_of(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    head = f"{row['kernel']:21} {written(row['size']):21} {row['kind']:8}"
    if "error" in row:
        return f"{head} {row['error'][:150]} {row.get('tiles') or ''}"
    if "kernels" in row:
        return f"{head} {json.dumps(row['kernels'])}"
    times = ", ".join(f"{name} {time:.1f} us" for name, time in row.get("us", {}).items() if time is not None)
    ratio = f"{row['ratio']:.2f}x " if row.get("ratio") else ""
    exact = {True: "exact ", False: "rounded ", None: ""}[row.get("exact")]
    return f"{head} {ratio}{exact}{times} {row.get('tiles') or ''}"


def run_kernel(
    chosen: argparse.Namespace, record: Record, kernel: str, sizes: Sequence[Any], end: float
) -> None:
    """Measure one kernel at the sizes that are not done, with a new process wherever one was killed or died."""
    for _ in range(MOST_STARTS):
        left = [size for size in sizes if not record.has(kernel, size, "final")]
        if not left or monotonic() >= end:
            return
        job = {
            "kernel": kernel,
            "sizes": left,
            "seconds": end - monotonic(),
            "done": [row for size in left for row in record.of(kernel, size, "point")],
            "points": 2 if chosen.tiny else None,
        }
        command = [sys.executable, __file__, "--out", str(chosen.out), "--job", json.dumps(job)]
        command += ["--interpret"] if chosen.interpret else []
        trying, reason = run_process(command, environment_of(chosen), record, chosen, end)
        if reason is None:
            return
        tried = trying or {"size": left[0], "kind": "start"}
        record.add({"kernel": kernel, "error": reason} | tried)
        if tried["kind"] == "start":  # no other size would fare better
            return


def environment_of(chosen: argparse.Namespace) -> dict[str, str]:
    """What a process runs under."""
    if not chosen.interpret:
        return {"NCCL_NVLS_ENABLE": "0", **os.environ}
    # As tests/kernels/interpreter.py says; not imported here, since it imports jax.
    flags = f"--xla_force_host_platform_device_count={chosen.devices}"
    return {**os.environ, "NPROC": "64", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def run_process(
    command: list[str], environment: dict[str, str], record: Record, chosen: argparse.Namespace, end: float
) -> tuple[dict[str, Any] | None, str | None]:
    """Keep the rows that a process says; what it was trying, and why it ended, unless it ended well or at `end`."""
    lines: queue.Queue[str | None] = queue.Queue()
    errors = chosen.out / "errors.log"
    with errors.open("a") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    reader = threading.Thread(target=read_into, args=(process.stdout, lines), daemon=True)
    reader.start()
    trying: dict[str, Any] | None = None
    try:
        while (line := lines.get(timeout=max(min(SILENCE_S, end - monotonic()), 0.0))) is not None:
            kind, _, content = line.partition(" ")
            if kind == "TRYING":
                trying = json.loads(content)
            elif kind == "ROW":
                record.add(json.loads(content))
    except queue.Empty:
        process.kill()
        process.wait()
        reader.join()
        if monotonic() >= end:
            return trying, None
        return trying, f"said nothing for {SILENCE_S:.0f} s and was killed"
    code = process.wait()
    last = (errors.read_text().strip().splitlines() or [""])[-1]
    return trying, None if code == 0 else f"its process ended with {code}: {last[:300]}"


def read_into(pipe: Any, lines: queue.Queue[str | None]) -> None:
    """Pass on what a process says, and that it has ended."""
    with pipe:
        for line in pipe:
            lines.put(line.strip())
    lines.put(None)


# --- what the tool chooses ---


def sizes_to_choose(chosen: argparse.Namespace) -> list[Any]:
    """Kernel, whether its link is measured alone, and size; those that tell lines first."""
    of = {kernel: TINY[kernel] for kernel in CHOSEN} if chosen.tiny else CHOSEN
    every = [[kernel, at < TELL_LINES, size] for kernel, its in of.items() for at, size in enumerate(its)]
    return sorted(every, key=lambda one: not one[1])


def size_on_each(kernel: str, size: Sequence[int], devices: int) -> Size:
    """A size as a plan's kernels have it."""
    m, k, *n = size
    rows = m // devices if COLLECTIVE_OF[kernel] == "all-gather" else m
    return Size(kernel, devices, "bf16", rows, k, *(n or [1]))


def choices(record: Record) -> list[dict[str, Any]]:
    """Of each size what the rule chooses, by lines through those that tell them, and what was measured to be faster."""
    rows = [row for row in record.rows if row["kernel"] == CHOICES and row.get("us", {}).get("fused")]
    sizes = [size_on_each(row["size"][0], row["size"][2], row["devices"]) for row in rows]
    telling = [(size, row["us"]) for size, row in zip(sizes, rows, strict=True) if "link alone" in row["us"]]
    measured = {size: 1e3 * us["fused"] for size, us in telling}
    links: dict[str, list[tuple[int, float]]] = {}
    for size, us in telling:
        links.setdefault(COLLECTIVE_OF[size.kernel], []).append(
            (size.collective_bytes, 1e3 * us["link alone"])
        )
    # A plan's matmuls were measured in the step; so were these.
    products = {size.flops: 1e3 * row["us"]["compute alone"] for size, row in zip(sizes, rows, strict=True)}
    limits = Limits(products, 1.0, 1.0, lambda opcode, moved: between(links[opcode], moved))
    separates: dict[str, list[tuple[float, float]]] = {}
    for size, us in telling:
        separates.setdefault(size.kernel, []).append((limits.separate_ns(size), 1e3 * us["separate"]))
    found = []
    for size, row in zip(sizes, rows, strict=True):
        # Calls in a loop are not as in a step: what both alone take has the loop's own time twice.
        offset_ns, slope = line(separates[size.kernel])
        separate_ns = offset_ns + slope * limits.separate_ns(size)
        faster = is_faster(size, separate_ns, measured, limits)
        of = {"fused": row["us"]["fused"], "separate": row["us"]["separate"]}
        choice, best = "fused" if faster else "separate", min(of, key=lambda name: of[name])
        found.append(
            {
                "kernel": size.kernel,
                "size": row["size"][2],
                "told": size not in measured,
                "foretold": [fused_ns(size, measured, limits) / 1e3, separate_ns / 1e3],
                "us": of,
                "choice": choice,
                "best": best,
                "loss": of[choice] / of[best] - 1,
            }
        )
    return found


def between(points: Iterable[tuple[int, float]], at: float) -> float:
    """On the straight lines through the points, the outer ones going on."""
    known = sorted(points)
    if len(known) == 1:
        return known[0][1]
    upper = next((n for n, one in enumerate(known) if one[0] >= at and n), len(known) - 1)
    (x, y), (also_x, also_y) = known[upper - 1], known[upper]
    return max(0.0, y + (also_y - y) * (at - x) / max(1, also_x - x))


def choices_table(record: Record) -> str:
    """What was chosen of each size, and what that loses."""
    head = ("kernel", "size", "fused, µs", "separate, µs", "foretold", "choice", "faster", "loss")
    rows = []
    found = choices(record)
    for one in sorted(found, key=lambda one: (list(CHOSEN).index(one["kernel"]), one["us"]["separate"])):
        told = " / ".join(f"{us:.0f}" for us in one["foretold"]) if one["told"] else "tells the line"
        of, loss = one["us"], f"{one['loss']:.1%}" if one["loss"] else "-"
        size, times = written(one["size"]), (f"{of['fused']:.1f}", f"{of['separate']:.1f}")
        rows.append((one["kernel"], size, *times, told, one["choice"], one["best"], loss))
    right = sum(one["choice"] == one["best"] for one in found)
    foretold = [one["choice"] == one["best"] for one in found if one["told"]]
    worst = max((one["loss"] for one in found), default=0.0)
    total = f"{right} of {len(found)} chosen rightly, {sum(foretold)} of the {len(foretold)} foretold; "
    total += f"the largest loss is {worst:.1%}"
    return f"{markdown((head, rows))}\n{total}"


# --- the rows as Markdown ---

SPEED = (
    "kernel",
    "size",
    "separate, µs",
    "fused, µs",
    "times as fast",
    "compute alone, µs",
    "link alone, µs",
)
ORDER = (
    "kernel",
    "size",
    "remote first, µs",
    "in order of rows, µs",
    "skew, remote first",
    "skew, in order of rows",
)


def table(record: Record) -> str:
    """Three tables: every kernel beside what it replaces and its limits; the two orders, and the skew of the devices;
    the calls without a loop."""
    rows = [
        row for row in record.rows if row["kind"] == "final" and "us" in row and row["kernel"] in FUSED_ONES
    ]
    rows.sort(key=lambda row: (list(SIZES).index(row["kernel"]), SIZES[row["kernel"]].index(size_of(row))))
    speed, order, alone = list[Any](), list[Any](), list[Any]()
    for row in rows:
        us, name = row["us"], (row["kernel"], written(row["size"]))
        for loop, lines in (("", speed), (" without a loop", alone)):
            if f"separate{loop}" in us:
                keys = "separate", "fused", "compute alone", "link alone"
                separate, fused, *limits = (us.get(key + loop) for key in keys)
                times = [f"{separate:.0f}", f"{fused:.0f}", f"{separate / fused:.2f}"]
                lines.append((*name, *times, *(f"{limit:.0f}" if limit else "-" for limit in limits)))
            if f"fused in order of rows{loop}" in us:
                orders = "fused", "fused in order of rows"
                skews = [skew(record, row, of_it) for of_it in orders]
                order.append((*name, *(f"{us[of_it + loop]:.0f}" for of_it in orders), *skews))
    return "\n".join(map(markdown, ((SPEED, speed), (ORDER, order), (SPEED, alone)))).rstrip()


def size_of(row: dict[str, Any]) -> Any:
    """A row's size as SIZES has it."""
    return tuple(row["size"]) if isinstance(row["size"], list) else row["size"]


def written(size: Any) -> str:
    """A size in a table or a line."""
    return " × ".join(map(str, size if isinstance(size, list) else [size]))


def skew(record: Record, row: dict[str, Any], call: str) -> str:
    """By how much the fused kernel takes longer on the slowest device than on the fastest."""
    later = record.rows[record.rows.index(row) + 1 :]
    same = [one for one in later if (one["kernel"], one["size"]) == (row["kernel"], row["size"])]
    if same and same[0]["kind"] == "trace":
        for kernel, us in same[0].get("kernels", {}).get(call, {}).items():
            if FUSED_KERNEL in kernel:
                return f"{100 * (max(us) / min(us) - 1):.1f} %"
    return "-"


if __name__ == "__main__":
    main()
