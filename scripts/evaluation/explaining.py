"""The traces that a cell keeps, as a page for people: why its rows take what they take (DisCo, section 6.5)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.baselines import beside_transfers, one_at_a_time, varied_buckets
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Strategy
from disco_hlo.profiler.allreduce import AllReduceFit
from disco_hlo.profiler.keys import owners
from evaluation.predicting import what_ran
from evaluation.record import ALONE_XLA, CellName, Record, RecordError
from evaluation.step import Files
from evaluation.traced_kernels import TRANSFER, Loss, Piece, drift, losses, paired, pieces

PROFILED_ALONE, PROFILED_BESIDE = "profile, XLA's kernels", "profile, transfers beside XLA's kernels"
"""Traces of the profile, whose buckets are varied."""
_OF_ANOTHER = """
## {name}

XLA compiled another step for this row: its kernels cannot be held against those of the others.
"""


def explained(out: Path, cell: CellName, only: Sequence[str] | None = None) -> str:
    """What the traces of a cell show, as text.

    Raises:
        DiscoError: there is no record of the cell, no such row, or no trace of it.
    """
    path = out / f"{cell.stem}.json"
    if not path.exists():
        raise DiscoError(f"there is no record {path}")
    try:
        record = Record.open(out, cell)
    except RecordError as error:
        raise DiscoError(str(error)) from error
    files = Files(out, cell)
    module = files.module()
    if module is None:
        raise DiscoError(f"{files.folder} holds no module")
    source, owner = canonicalize(module), owners(module)
    if source.graph.backend != "gpu":
        raise DiscoError(f"{cell.stem} ran on {source.graph.backend}, where nothing runs beside a transfer")
    found: dict[str, list[Piece]] = {}
    of_another: list[str] = []
    for name in (PROFILED_ALONE, PROFILED_BESIDE, *record.rows()):
        trace = files.trace(name)
        if trace is None:
            continue
        graph, strategy = _what_ran(source, files, name)
        if graph.fingerprint == source.graph.fingerprint:
            found[name] = pieces(source, owner, strategy, trace)
        else:
            of_another.append(name)
    for name in only or ():
        if name not in found and name not in of_another:
            raise DiscoError(f"{files.folder} holds no trace of a row {name!r}")
    if not found:
        raise DiscoError(f"{files.folder} holds no traces")
    fitted = files.profile()
    lines = None if fitted is None else fitted.all_reduce
    alone = {name: found.get(PROFILED_ALONE if name == PROFILED_BESIDE else ALONE_XLA, []) for name in found}
    shown = [name for name in found if (name in only if only else name not in (PROFILED_ALONE, ALONE_XLA))]
    sections = [_section(name, alone[name], found[name]) for name in shown]
    sections += [_OF_ANOTHER.format(name=name) for name in of_another if not only or name in only]
    if lines is not None and PROFILED_ALONE in found:
        sections.append(_sizes(source.graph, found[PROFILED_ALONE], lines))
    return f"# {cell.stem}\n" + "".join(sections)


def _what_ran(source: CanonicalModule, files: Files, name: str) -> tuple[Graph, Strategy | None]:
    """The graph and strategy that ran in a trace of this name; of XLA's default the strategy is None."""
    graph = source.graph
    if name == DEFAULT:
        return graph, None
    if name == PROFILED_ALONE:
        return graph, one_at_a_time(graph, varied_buckets(read(source)))
    if name == PROFILED_BESIDE:
        return graph, beside_transfers(graph, varied_buckets(read(source)))
    return what_ran(files, name, source)[:2]


def _section(name: str, alone: Sequence[Piece], row: Sequence[Piece]) -> str:
    pairs = paired(alone, row)
    lines = [f"\n## {name}\n", f"{len(pairs)} of {len(row)} kernels and transfers ran alone, too."]
    if pairs:
        lines += [
            f"Kernels with nothing beside them took {drift(pairs):.3f} of that; the others beyond it:\n",
            "| | count | alone, ms | beside, ms | lost, ms | lost of beside |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
            *(_row(loss) for loss in losses(pairs)),
            "",
        ]
    transfers = [one for one in row if one.what == TRANSFER]
    waited_us = sorted(one.waited_ns / 1e3 for one in transfers)
    if waited_us:
        behind = sorted(one.behind for one in transfers if one.behind)
        counts = ", ".join(f"{behind.count(kind)} {kind}" for kind in dict.fromkeys(behind)) or "none"
        lines.append(
            f"{len(transfers)} transfers waited {sum(waited_us) / 1e3:.2f} ms in all once they could have begun, "
            f"{waited_us[len(waited_us) // 2]:.0f} us in the median, {waited_us[-1]:.0f} at most; "
            f"for a kernel's end: {counts}."
        )
    return "\n".join(lines) + "\n"


def _sizes(graph: Graph, alone: Sequence[Piece], lines: AllReduceFit) -> str:
    """Transfers as the profile's step had them alone, by size, and what the sweep says of them."""
    by_octave: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for one in alone:
        if one.what == TRANSFER:
            size_bytes = sum(graph.transfer_bytes(node) for node in one.nodes)
            swept_ns = float(lines.predict_ns([size_bytes])[0])
            by_octave[max(10, size_bytes.bit_length())].append((swept_ns, one.length_ns))
    text = [
        "\n## transfers alone, in the profile's step\n",
        "| below, KiB | count | swept, us | traced, us |",
    ]
    text.append("| ---: | ---: | ---: | ---: |")
    for octave, times in sorted(by_octave.items()):
        swept_us, traced_us = (mean(values) / 1e3 for values in zip(*times, strict=True))
        text.append(f"| {1 << (octave - 10)} | {len(times)} | {swept_us:.1f} | {traced_us:.1f} |")
    return "\n".join(text) + "\n"


def _row(loss: Loss) -> str:
    share = f"{loss.lost_ns / loss.shared_ns:.2f}" if loss.shared_ns else "-"
    alone_ms, shared_ms, lost_ms = (ns / 1e6 for ns in (loss.alone_ns, loss.shared_ns, loss.lost_ns))
    return f"| {loss.what} | {loss.count} | {alone_ms:.2f} | {shared_ms:.2f} | {lost_ms:.2f} | {share} |"
