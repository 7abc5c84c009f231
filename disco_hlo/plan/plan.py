"""A strategy, and a plan: the strategy with its provenance, as one readable, versioned JSON document.

A strategy says what XLA shall execute (DisCo, section 3.2, and the order beyond it). It speaks of the nodes of one
:class:`~disco_hlo.hlo.graph.Graph` by number, and is complete: ``apply(strategy, module)`` leaves XLA nothing to
decide. Its execution *units* are

* ``g3``  op group 3 (one fusion kernel),
* ``b2``  bucket 2; where collectives are asynchronous ``b2.start`` and ``b2.done``,
* ``n17`` a single node that is in no group (wrapped as a one-op kernel where the backend needs it).

A strategy names ops only. Parameters, constants, tuples, get-tuple-elements and bitcasts are not units; the bitcasts
through which the ops of a group read are in its kernel, unnamed (:mod:`disco_hlo.hlo.graph`).

Two kinds of things are in a plan. What a search derives from its inputs (the module, the measured op
times, settings and seed) is the same on every run and every rank. What a clock said while the
finalists ran, and the choice among them that follows from it, is not. The plan *executes* the choice
(``strategy``, ``chosen``), because nothing measured slower may win; where that is not the search's
own first, ``searched`` keeps the latter. So the plan as the search left it can be had again, byte for byte the same
in two runs with one seed.

A plan file is data from outside: it is decoded by schema and refused with the place and the reason;
whether its strategy is legal on a module is judged when it is applied.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from disco_hlo.errors import PlanError, why_unreadable
from disco_hlo.hlo.cost_model import Line
from disco_hlo.hlo.regions import ENTRY

FORMAT = "disco-hlo plan"
VERSION = 2
MAX_BYTES = 64 << 20
"""Largest plan file that is read."""
DEFAULT = "XLA default"
"""Name of the candidate that is XLA's own module, untouched."""
SEARCHED = "plan"
"""Name of the candidate that the search itself puts first."""
Nanoseconds = Annotated[int, Meta(ge=0, le=1 << 60)]
Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Ratio = Annotated[float, Meta(ge=0, le=1e9)]
Text = Annotated[str, Meta(max_length=4096)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_LINE = re.compile(rb"\n *")
_SCALARS = re.compile(rb'\[((?:\n *(?:"(?:[^"\\]|\\.)*",?|[^\s"\[\]{}]+))+)\n *\]')
"""A list of texts and numbers, each on a line."""
# Strategies -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """Ops that run as one kernel."""

    nodes: tuple[int, ...]
    """Ops this group owns, ascending. An op has at most one owner. The group's results are
    the owned ops that anything outside reads (or the entry root returns)."""
    duplicates: tuple[int, ...] = ()
    """Ops recomputed inside, ascending; what else needs their value takes it from their owner."""
    kind: str = "loop"
    """Emitter: ``loop`` (kLoop), ``input`` (kInput), ``output`` (kOutput, CPU), ``triton`` (GPU)."""
    config: str = ""
    """Emitter settings as canonical JSON (Triton tiles); empty where the emitter has none."""

    @property
    def ops(self) -> tuple[int, ...]:
        """All that it computes, ascending."""
        return tuple(sorted((*self.nodes, *self.duplicates)))


class Bucket(Struct, frozen=True):
    """Collectives that travel together."""

    collectives: tuple[int, ...] = field(name="all_reduces")
    """Nodes in transfer order. Saved plans have them under the name from when only all-reduces were moved."""
    form: str = "concat"
    """``concat``: one all-reduce over the concatenation. ``variadic``: one instruction with several
    operands (on GPU one NCCL group). A bucket of one is always ``concat``."""

    @property
    def is_packed(self) -> bool:
        """Whether a kernel packs its arrays into one before they travel."""
        return len(self.collectives) > 1 and self.form == "concat"


@dataclass(frozen=True, slots=True)
class Strategy:
    """Op groups, buckets and the order of their execution, in the entry of a step and in its regions."""

    groups: tuple[Group, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    """Every node of :attr:`~disco_hlo.hlo.graph.Graph.collectives` is in exactly one."""
    order: tuple[str, ...] = ()
    """Every unit once, in execution order; empty means the deterministic default order of ``apply``."""
    regions: tuple[tuple[str, Strategy], ...] = ()
    """Of the entry: the strategies of loop bodies, branches and called computations, ascending by name
    (:class:`disco_hlo.hlo.regions.Region`). A region that is not named stays as XLA compiled it."""


# Plans ------------------------------------------------------------------------------------------


class Target(Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan was made for. It is enacted where all of this but the fingerprint agrees; where that does not, the
    strategy is applied anew."""

    key: Sha256
    """Of the canonical graph: under it the plan is found."""
    fingerprint: Sha256
    """Of the same graph: its identity, the values of all constants included."""
    module_name: Text
    backend: Text
    """``cpu`` or ``gpu``."""
    device_kind: Text
    device_count: Annotated[int, Meta(ge=1, le=1 << 20)]
    process_count: Annotated[int, Meta(ge=1, le=1 << 20)]


class Prediction(Struct, frozen=True, forbid_unknown_fields=True):
    """What the simulator said of one step, in nanoseconds (DisCo, section 4.4)."""

    plan_ns: Nanoseconds
    default_ns: Nanoseconds
    """XLA's own plan."""
    unfused_ns: Nanoseconds
    full_overlap_ns: Nanoseconds
    """FO of DisCo, section 6.2: the larger of all computation and all communication."""
    bound_ns: Nanoseconds
    """The tighter bound that keeps dependencies (see ``docs/simulator.md``)."""
    peak_memory_bytes: Count = 0


class SearchRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """How the strategy was found."""

    method: Text
    settings: dict[Text, int | float | str | bool | None]
    evaluations: Count
    improvements: tuple[tuple[Count, Nanoseconds], ...]
    """(evaluation, predicted step time) of every new best."""


class Candidate(Struct, frozen=True, forbid_unknown_fields=True):
    """One module that was run on the devices."""

    name: Text
    """``XLA default``, ``unfused``, ``plan`` and so on."""
    predicted_ns: Nanoseconds
    median_ns: Nanoseconds
    spread_ns: Nanoseconds
    """Half the distance between the quartiles."""
    samples: Count
    error: Text = ""
    """Why it could not be run; then the times are zero."""
    only_timed: bool | UnsetType = UNSET
    """True where nobody looked whether it computes what XLA's default computes; else left out."""
    ratio: Ratio | UnsetType = UNSET
    """Median over the rounds of its time over XLA's default's in the same round; left out where it did not run."""
    ratio_noise: Ratio | UnsetType = UNSET
    """Two standard errors of :attr:`ratio`; left out with it."""


class Measured(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a clock said; two runs differ here."""

    created: Text
    """UTC time, ISO 8601."""
    candidates: tuple[Candidate, ...]
    """Measured alternately in one run, XLA's default among them."""
    all_reduce: tuple[Line, ...]
    """Of the profiled step (DisCo, section 4.2)."""
    profile_s: float
    search_s: float
    measure_s: float
    evaluations_per_s: float

    @property
    def results(self) -> dict[str, Candidate]:
        """By name, what ran and is known to compute what XLA's default computes."""
        return {one.name: one for one in self.candidates if one.samples and not (one.error or one.only_timed)}


class Structure(Struct, frozen=True, forbid_unknown_fields=True):
    """Moves that change the step's structure before XLA fuses and orders it (see ``docs/structure.md``)."""

    name: Text
    """Of the schedule that the moves come from."""
    key: Sha256
    """Of the canonical graph of the early module that the moves are made on."""
    result: Sha256
    """Key of the canonical graph of the scheduled module that XLA then makes: the strategy's nodes are its nodes."""
    moves: Annotated[tuple[dict[Text, Any], ...], Meta(min_length=1, max_length=1 << 16)]
    """As ``disco_hlo.structure`` writes them; judged when they are applied."""


class RegionStrategy(Struct, frozen=True, forbid_unknown_fields=True):
    """The strategy of one computation that XLA schedules."""

    computation: Text
    groups: tuple[Group, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    order: tuple[str, ...] = ()


class Strategies(Struct, frozen=True, forbid_unknown_fields=True):
    """A strategy for each region of a step, that of the entry computation first."""

    regions: Annotated[tuple[RegionStrategy, ...], Meta(min_length=1, max_length=1 << 16)]

    def __post_init__(self) -> None:
        """Refuse regions that come twice or in another order."""
        first, *others = [region.computation for region in self.regions]
        if first != ENTRY or others != sorted(set(others)) or ENTRY in others:
            raise ValueError(
                f'expected the region "{ENTRY}", then others in ascending order, each once; found '
                f"{', '.join([first, *others][:8])}"
            )

    @property
    def strategy(self) -> Strategy:
        """As one value."""
        entry, *inner = (
            (region.computation, Strategy(region.groups, region.buckets, region.order))
            for region in self.regions
        )
        return replace(entry[1], regions=tuple(inner))


def by_region(strategy: Strategy) -> Strategies:
    """A strategy as a plan holds it."""
    return Strategies(tuple(
        RegionStrategy(name, one.groups, one.buckets, one.order)
        for name, one in ((ENTRY, strategy), *strategy.regions)
    ))  # fmt: skip


class Searched(Struct, frozen=True, forbid_unknown_fields=True):
    """What the search put first, where the measurement preferred another candidate."""

    strategies: Strategies = field(name="strategy")
    module_sha256: Sha256
    """Of the optimized module that this strategy makes of the step."""
    structure: Structure | UnsetType = UNSET


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan. ``chosen`` names the candidate whose strategy this is; only a clock can make it another
    than :data:`SEARCHED`."""

    format: str
    version: int
    target: Target
    versions: dict[Text, Text]
    """jax, jaxlib, disco_hlo and, on GPU, the driver's runtime."""
    strategies: Strategies = field(name="strategy")
    chosen: Text
    prediction: Prediction
    search: SearchRecord
    module_sha256: Sha256
    """Of the optimized HLO module that lies beside the plan."""
    notes: tuple[Text, ...] = ()
    """What a reader should know: donation lost, share of the step in loops, nothing to win."""
    measured: Measured | None = None
    searched: Searched | None = None
    """None where ``strategy`` is the search's own."""
    structure: Structure | UnsetType = UNSET
    """Left out where the step keeps the structure that XLA gives it: most plans."""
    launched_singly: bool | UnsetType = UNSET
    """True where the host launches each kernel by itself
    (:func:`~disco_hlo.optimize.regions.launched_singly`); else left out."""

    @property
    def strategy(self) -> Strategy:
        """What the plan says of the step."""
        return self.strategies.strategy

    @property
    def ops_key(self) -> str:
        """Of the graph whose nodes ``strategy`` speaks of."""
        return self.target.key if self.structure is UNSET else self.structure.result


def encode(plan: Plan) -> bytes:
    """The plan as readable JSON; equal plans give equal bytes."""
    text = msgspec.json.format(msgspec.json.encode(plan, order="deterministic"), indent=1)
    # A thousand node numbers are read sideways, not down.
    return _SCALARS.sub(lambda found: b"[" + _LINE.sub(b" ", found[1]).strip() + b"]", text) + b"\n"


def decode(data: bytes, source: str) -> Plan:
    """Read a plan.

    Args:
        data: the file's bytes.
        source: where they came from, for messages.

    Raises:
        PlanError: not JSON, another format or version, or a field that is missing, unknown, of the
            wrong type or out of range.
    """
    if len(data) > MAX_BYTES:
        raise PlanError(f"{source}: {len(data)} bytes, more than a plan may have ({MAX_BYTES})")
    try:
        raw: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PlanError(f"{source}: expected a plan as JSON: {why_unreadable(error)}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise PlanError(f'{source}: expected a JSON object with "format": "{FORMAT}"')
    if raw.get("version") != VERSION:
        raise PlanError(
            f"{source}: plan version {raw.get('version')!r}; this disco-hlo reads version {VERSION}; "
            "search again"
        )
    try:
        return msgspec.convert(raw, Plan)
    except (msgspec.ValidationError, RecursionError) as error:
        raise PlanError(f"{source}: {error}") from None
