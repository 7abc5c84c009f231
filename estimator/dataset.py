"""Measured fused ops: the file that they live in, and what the estimator learns from them.

One SQLite file for one kind of device (DisCo, section 5.2). It holds the modules themselves, so
that features can be computed again when their definition changes, and every single measurement,
so that the noise of measuring is known. Samples are told apart by their structural key; a second
one of the same structure is not stored, whatever model it comes from.

Two splits (both are reported): samples whose structure training never saw, and whole models left
out. Single ops are never tested on: a profile measures them all, so the estimator is always told.
"""

from __future__ import annotations

import json
import re
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import ProfileError
from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel, calibrated, measured_ops
from disco_hlo.estimator.features import Batch, encode, graph_features, joined
from disco_hlo.estimator.samples import FusedOp
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.cost_model import Kernels, triton_emitter
from disco_hlo.hlo.graph import Graph
from disco_hlo.printable import counted
from disco_hlo.sqlite_file import SqliteFile

SCHEMA_VERSION = 1
_MOST_MODULE_BYTES = 1 << 30
_MOST = 1 << 60
"""Of a number in the file: sums of them stay inside 64 bits."""
_MOST_LOAD = 1e6
_TABLES = (
    "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE source (id INTEGER PRIMARY KEY, model TEXT NOT NULL, name TEXT NOT NULL UNIQUE,"
    " fingerprint TEXT NOT NULL, module BLOB NOT NULL)",
    "CREATE TABLE sample (id INTEGER PRIMARY KEY, source INTEGER NOT NULL REFERENCES source,"
    " key TEXT NOT NULL UNIQUE, members BLOB NOT NULL, results BLOB NOT NULL, kind TEXT NOT NULL,"
    " config TEXT NOT NULL)",
    "CREATE TABLE measurement (sample INTEGER NOT NULL REFERENCES sample, pack INTEGER NOT NULL,"
    " low_ns INTEGER NOT NULL, median_ns INTEGER NOT NULL, spread_ns INTEGER NOT NULL,"
    " repeats INTEGER NOT NULL, load REAL NOT NULL)",
    "CREATE INDEX measurement_sample ON measurement (sample)",
    "CREATE TABLE failure (sample INTEGER PRIMARY KEY REFERENCES sample, reason TEXT NOT NULL)",
    "CREATE TABLE attempt (sample INTEGER PRIMARY KEY REFERENCES sample, pack INTEGER NOT NULL,"
    " worker INTEGER NOT NULL)",
)


@dataclass(frozen=True, slots=True)
class Source:
    """A computation of a captured training step that XLA schedules: its entry or a region."""

    id: int
    model: str
    """Its model (``bert``): leave-one-model-out leaves out all sources of one."""
    name: str
    """Model, size and what was changed in it; the region, where it is a loop body or a branch of the step."""
    fingerprint: str
    """Of the computation that its samples are kernels of: the entry or a region."""

    @property
    def group(self) -> str:
        """Its model, and whether it is a loop body of that: what errors are reported by."""
        return f"{self.model}, loop bodies" if re.search(r", loop\d+$", self.name) else self.model


@dataclass(frozen=True, slots=True)
class Sample:
    """A fused op of a source."""

    id: int
    source: int
    key: str
    op: FusedOp


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of one sample in one pack, over all its runs."""

    low_ns: int
    """Lower quartile: on a busy CPU the others only add to it."""
    median_ns: int
    spread_ns: int
    """Half the distance between the quartiles."""
    repeats: int
    load: float
    """Processes that wanted to run, per core, while it was measured (0 on GPU)."""


class Dataset(SqliteFile):
    """The data set in the file ``path``, created where it does not exist.

    Raises:
        ProfileError: the file is no data set, is damaged, or is of another version.
    """

    KIND = "data set of fused ops"
    APPLICATION_ID = 0x64697366  # "disf"
    VERSION = SCHEMA_VERSION
    TABLES = _TABLES

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._canonical: dict[bytes, CanonicalModule] = {}
        """The module asked for last: its regions are asked for one after the other."""

    # What it is about ---------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """Provenance: device, versions, how it was measured."""
        rows = self._rows("SELECT name, value FROM about ORDER BY name")
        try:
            return {name: json.loads(value) for name, value in rows}
        except ValueError as error:
            raise ProfileError(f"{self.path} is damaged: its provenance is no JSON: {error}") from error

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Note provenance; :class:`ProfileError` where it contradicts what is noted already."""
        known = self.about()
        for name, value in facts.items():
            if name in known and known[name] != value:
                raise ProfileError(
                    f"{self.path} was measured with {name} = {known[name]!r}, this is {value!r}; use another file"
                )
        rows = [
            (name, json.dumps(value, sort_keys=True)) for name, value in facts.items() if name not in known
        ]
        with self._writing() as connection:
            connection.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", rows)

    # Sources and samples ------------------------------------------------------------------------

    def add_source(self, model: str, name: str, fingerprint: str, module: bytes) -> Source:
        """Store a captured module; the one already there under this name where its fingerprint is the same."""
        for found in self.sources():
            if found.name == name:
                if found.fingerprint != fingerprint:
                    raise ProfileError(
                        f"{self.path} holds another {name}: the model has changed; use another file"
                    )
                return found
        with self._writing() as connection:
            cursor = connection.execute(
                "INSERT INTO source (model, name, fingerprint, module) VALUES (?, ?, ?, ?)",
                (model, name, fingerprint, zlib.compress(module, 9)),
            )
        assert cursor.lastrowid is not None
        return Source(cursor.lastrowid, model, name, fingerprint)

    def sources(self) -> list[Source]:
        """All captured steps, in the order they came."""
        return [
            Source(self._integer(number), *(self._text(word) for word in words))
            for number, *words in self._rows("SELECT id, model, name, fingerprint FROM source ORDER BY id")
        ]

    def module(self, source: Source) -> bytes:
        """The serialized module of a source."""
        ((packed,),) = self._rows("SELECT module FROM source WHERE id = ?", (source.id,))
        try:
            unpacker = zlib.decompressobj()
            module = unpacker.decompress(packed, _MOST_MODULE_BYTES)
        except (TypeError, zlib.error) as error:
            raise ProfileError(
                f"{self.path} is damaged: the module of {source.name} does not unpack"
            ) from error
        if not unpacker.eof:
            raise ProfileError(f"{self.path} is damaged: the module of {source.name} is not whole")
        return module

    def computation(self, source: Source) -> CanonicalModule:
        """The entry or region that a source is, in canonical form.

        Raises:
            ProfileError: the module has none of its fingerprint, so node ids of its samples mean nothing.
        """
        module = self.module(source)
        if module not in self._canonical:
            self._canonical = {module: canonicalize(module)}
        for one in self._canonical[module].computations.values():
            if one.graph.fingerprint == source.fingerprint:
                return one
        raise ProfileError(
            f"{self.path}: no computation of {source.name} has the fingerprint {source.fingerprint:.16} that its "
            "samples were drawn by, since the canonical form has changed; draw them again"
        )

    def add_samples(self, source: Source, ops: Mapping[str, FusedOp]) -> int:
        """Store fused ops by structural key; returns how many were new."""
        rows = [
            (source.id, key, _packed(op.members), _packed(op.results), op.kind, op.config)
            for key, op in ops.items()
        ]
        with self._writing() as connection:
            before = connection.total_changes
            connection.executemany(
                "INSERT OR IGNORE INTO sample (source, key, members, results, kind, config) VALUES (?, ?, ?, ?, ?, ?)",
                rows,
            )
            return connection.total_changes - before

    def samples(self, source: Source | None = None) -> list[Sample]:
        """The fused ops (of one source), in the order they came."""
        where, values = ("WHERE source = ?", (source.id,)) if source else ("", ())
        query = f"SELECT id, source, key, members, results, kind, config FROM sample {where} ORDER BY id"
        found = []
        for id_, source_id, key, members, results, kind, config in self._rows(query, values):
            op = FusedOp(self._ids(members), self._ids(results), self._text(kind), self._text(config))
            found.append(Sample(self._integer(id_), self._integer(source_id), self._text(key), op))
        return found

    # Measurements -------------------------------------------------------------------------------

    def claim(
        self,
        times: int,
        choose: Callable[[Sequence[int]], Sequence[int]],
        worker: int = 0,
        at_least: int = 0,
    ) -> tuple[int, list[int]]:
        """Note that a pack is about to be compiled: its number, and the ids of its samples, none when all is done.

        ``choose`` picks from the ids of samples measured at least ``at_least`` and fewer than ``times`` times that have
        not failed, less those that another pack holds.
        Processes that claim at once get different samples. What is claimed and neither recorded, failed nor
        forgotten when the file is next opened killed the process.
        """
        with self._writing() as connection:
            pending = connection.execute(
                "SELECT sample.id FROM sample LEFT JOIN measurement ON measurement.sample = sample.id"
                " WHERE sample.id NOT IN (SELECT sample FROM failure UNION SELECT sample FROM attempt)"
                " GROUP BY sample.id HAVING COUNT(measurement.pack) BETWEEN ? AND ? ORDER BY sample.id",
                (at_least, times - 1),
            )
            chosen = list(choose([row[0] for row in pending.fetchall()]))
            return self._attempt(connection, chosen, worker), chosen

    def begin(self, samples: Iterable[Sample], worker: int = 0) -> int:
        """:meth:`claim` for samples that are known already; returns the number of the pack."""
        with self._writing() as connection:
            return self._attempt(connection, [sample.id for sample in samples], worker)

    def _attempt(self, connection: sqlite3.Connection, ids: Sequence[int], worker: int) -> int:
        query = "SELECT MAX(pack) FROM (SELECT pack FROM measurement UNION ALL SELECT pack FROM attempt)"
        ((last,),) = connection.execute(query).fetchall()
        pack = (last or 0) + 1
        rows = [(id_, pack, worker) for id_ in ids]
        connection.executemany("INSERT OR REPLACE INTO attempt VALUES (?, ?, ?)", rows)
        return pack

    def interrupted(self, worker: int = 0, workers: int = 1) -> list[list[Sample]]:
        """The packs that this of ``workers`` processes began and never ended, each by its samples."""
        query = "SELECT sample, pack FROM attempt WHERE worker % ? = ?"
        attempts = dict(self._rows(query, (workers, worker)))
        packs: dict[int, list[Sample]] = {}
        for sample in self.samples() if attempts else []:
            if sample.id in attempts:
                packs.setdefault(attempts[sample.id], []).append(sample)
        return [packs[pack] for pack in sorted(packs)]

    def record(self, pack: int, measured: Mapping[int, Measurement]) -> None:
        """Store the times of a pack by sample id, and that it ended."""
        rows = [
            (sample, pack, m.low_ns, m.median_ns, m.spread_ns, m.repeats, m.load)
            for sample, m in measured.items()
        ]
        with self._writing() as connection:
            connection.executemany("INSERT INTO measurement VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            connection.execute("DELETE FROM attempt WHERE pack = ?", (pack,))

    def forget(self, pack: int) -> None:
        """Note that a pack ended without times, for a reason that is none of its samples'."""
        with self._writing() as connection:
            connection.execute("DELETE FROM attempt WHERE pack = ?", (pack,))

    def fail(self, sample: Sample, reason: str) -> None:
        """Note why a sample cannot be measured; it is not tried again."""
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO failure VALUES (?, ?)", (sample.id, reason[:1000]))
            connection.execute("DELETE FROM attempt WHERE sample = ?", (sample.id,))

    def measurements(self) -> dict[int, list[Measurement]]:
        """All measurements by sample id, in the order they were taken."""
        found: dict[int, list[Measurement]] = {}
        query = (
            "SELECT sample, low_ns, median_ns, spread_ns, repeats, load FROM measurement ORDER BY pack, rowid"
        )
        for sample, *times, load in self._rows(query):
            low_ns, median_ns, spread_ns, repeats = map(self._integer, times)
            if not isinstance(load, (int, float)) or not 0 <= load <= _MOST_LOAD or not low_ns or not repeats:
                raise ProfileError(f"{self.path} is damaged: a measurement of sample {sample!r:.80} is none")
            one = Measurement(low_ns, median_ns, spread_ns, repeats, float(load))
            found.setdefault(self._integer(sample), []).append(one)
        return found

    def failures(self) -> dict[int, str]:
        """Reasons by sample id."""
        rows = self._rows("SELECT sample, reason FROM failure ORDER BY sample")
        return {self._integer(sample): self._text(reason) for sample, reason in rows}

    # What may be anything in a file ---------------------------------------------------------------

    def _integer(self, value: object) -> int:
        if not isinstance(value, int) or not 0 <= value <= _MOST:
            raise ProfileError(
                f"{self.path} is damaged: it holds {value!r:.80}, expected a number from 0 to {_MOST}"
            )
        return value

    def _text(self, value: object) -> str:
        if not isinstance(value, str):
            raise ProfileError(f"{self.path} is damaged: it holds {value!r:.80}, expected a text")
        return value

    def _ids(self, value: object) -> tuple[int, ...]:
        if not isinstance(value, bytes) or len(value) % 4:
            raise ProfileError(
                f"{self.path} is damaged: a sample holds {value!r:.80}, expected numbers of nodes"
            )
        return tuple(np.frombuffer(value, "<i4").tolist())


def _packed(ids: Iterable[int]) -> bytes:
    return np.array(list(ids), "<i4").tobytes()


Indices = NDArray[np.int64]


@dataclass(frozen=True)
class TrainingData:
    """All measured samples of a data set, one row each."""

    known: Batch
    """Features with the measured times of single ops."""
    blind: Batch
    """The same without: the analytical estimate stands for them."""
    borrowed: Batch | None
    """As ``known``, with the analytical estimate that other weights were trained to correct."""
    log_ns: NDArray[np.float64]
    """``[samples]``: natural logarithm of the label."""
    repeated_ns: tuple[tuple[float, ...], ...]
    """All measurements of each sample, in the order they were taken."""
    model: NDArray[np.str_]
    """``[samples]``: the model each was drawn from."""
    group: NDArray[np.str_]
    """``[samples]``: :attr:`Source.group`."""
    is_single: NDArray[np.bool_]
    device: DeviceModel
    """The analytical estimate, calibrated on the single ops."""
    about: Mapping[str, Any]
    """Provenance of the data set."""

    def __len__(self) -> int:
        return len(self.log_ns)

    @property
    def fused(self) -> Indices:
        """The samples of two ops and more."""
        return np.flatnonzero(~self.is_single)


@dataclass(frozen=True, slots=True)
class Split:
    """Which samples to learn from, to stop by, and to report on."""

    train: Indices
    validation: Indices
    test: Indices


def label_ns(measurements: Sequence[Measurement], backend: str) -> float:
    """The time of a sample from the lower quartiles of its runs in each pack.

    Their middle; on CPU the least of them, since what else runs on the machine only adds.
    """
    low_ns = [measurement.low_ns for measurement in measurements]
    return float(min(low_ns) if BACKENDS[backend].shares_processor else np.median(low_ns))


def base_device(about: Mapping[str, Any]) -> DeviceModel:
    """The device before calibration, as the sampling assumed it."""
    config = about.get("config", {})
    try:
        bandwidth, flops = float(config["bandwidth"]), float(config["flops"])
        backend = BACKENDS[about["backend"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"the data set does not say what it was measured with ({error})") from error
    return DeviceModel(bandwidth, flops, hoists=backend.hoists)


def load(dataset: Dataset, other: DeviceModel | None = None) -> TrainingData:
    """Read and encode all measured samples, with the analytical estimate of an ``other`` device as well.
    :class:`ProfileError` where there are none, or the file is damaged."""
    measured = dataset.measurements()
    samples = [sample for sample in dataset.samples() if sample.id in measured]
    if not samples:
        raise ProfileError(
            f"{dataset.path} holds no measured samples; make some with scripts/sample_fused_ops.py"
        )
    about, sources = dataset.about(), dataset.sources()
    base = base_device(about)
    graphs = {source.id: dataset.computation(source).graph for source in sources}
    for sample in samples:
        _check(sample, graphs.get(sample.source), str(dataset.path))
    samples.sort(key=lambda sample: (sample.source, sample.id))
    labels = {sample.id: label_ns(measured[sample.id], about["backend"]) for sample in samples}
    times = {sample.key: labels[sample.id] for sample in samples if len(sample.op.members) == 1}
    device = calibrated(base, measured_ops(graphs.values(), times))
    source_of = {source.id: source for source in sources}
    return TrainingData(
        known=_encoded(samples, graphs, device, times),
        blind=_encoded(samples, graphs, device, {}),
        borrowed=None if other is None else _encoded(samples, graphs, other, times),
        log_ns=np.log([labels[sample.id] for sample in samples]),
        repeated_ns=tuple(tuple(float(m.low_ns) for m in measured[sample.id]) for sample in samples),
        model=np.array([source_of[sample.source].model for sample in samples]),
        group=np.array([source_of[sample.source].group for sample in samples]),
        is_single=np.array([len(sample.op.members) == 1 for sample in samples]),
        device=device,
        about={**about, "sources": {source.name: source.fingerprint for source in sources}},
    )


def _check(sample: Sample, graph: Graph | None, path: str) -> None:
    """Refuse a sample that is no kernel of its step."""
    members, results = sample.op.members, sample.op.results
    ascends = all(list(ids) == sorted({*ids}) for ids in (members, results))
    if graph is None or not results or not ascends or not {*results} <= {*members}:
        raise ProfileError(f"{path} is damaged: sample {sample.id} is no kernel of a step in it")
    if not 0 <= members[0] <= members[-1] < len(graph):
        raise ProfileError(f"{path} is damaged: sample {sample.id} has ops that its step has not")


def _encoded(
    samples: Sequence[Sample], graphs: Mapping[int, Graph], device: DeviceModel, times: Mapping[str, float]
) -> Batch:
    analytic = AnalyticModel(device)
    batches = []
    for source, graph in graphs.items():
        ops = [sample.op for sample in samples if sample.source == source]
        if not ops:
            continue
        kernels = Kernels.of_lists(
            [op.members for op in ops],
            [op.results for op in ops],
            [triton_emitter(op.config) if op.kind == "triton" else "" for op in ops],
        )
        batches.append(encode(graph_features(graph, analytic, times), kernels, analytic.scratch(graph)))
    return joined(batches)


def random_split(data: TrainingData, seed: int, test: int, validation: int) -> Split:
    """``test`` fused samples to report on. Structures are unique in a data set, so none of theirs is trained on."""
    fused = np.random.default_rng(seed).permutation(data.fused)
    if len(fused) < 2 * (test + validation):
        raise ProfileError(
            f"{len(fused)} fused samples are too few to put {test} aside for the test and {validation} for stopping"
        )
    held = fused[: test + validation]
    train = np.setdiff1d(np.arange(len(data)), held)
    return Split(train, np.sort(held[test:]), np.sort(held[:test]))


def model_split(data: TrainingData, model: str, seed: int, validation: int) -> Split:
    """All fused samples of one model (of ``llama_scan`` and ``llama_unroll`` for ``llama``) to report on, nothing of it
    to learn from."""
    is_out = (data.model == model) | np.char.startswith(data.model, f"{model}_")
    test = np.flatnonzero(is_out & ~data.is_single)
    rest = np.flatnonzero(~is_out & ~data.is_single)
    if not len(test) or len(rest) < 2 * validation:
        raise ProfileError(
            f"cannot leave out {model}: {counted(len(test), 'fused sample')} of it, {len(rest)} of other models"
        )
    held = np.sort(np.random.default_rng(seed).permutation(rest)[:validation])
    return Split(np.setdiff1d(np.flatnonzero(~is_out), held), held, test)


def noise(data: TrainingData, chosen: Indices) -> NDArray[np.float64]:
    """How far one measurement lies from the others of the same sample: relative, one number for each
    repeatedly measured sample of ``chosen``. No estimate can be judged more finely."""
    found = []
    for index in chosen:
        *others, last = data.repeated_ns[index]
        if others:
            middle = float(np.median(others))
            found.append(abs(last - middle) / middle)
    return np.array(found)
