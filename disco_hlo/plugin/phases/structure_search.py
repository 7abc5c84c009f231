"""Search over the step's structure: named schedules of moves, each searched like a step of its own.

It begins where order and buckets end: where a step computes anything again, communicates in loops, or the best plan
found leaves communication exposed that lies inside the layer (:func:`~disco_hlo.plugin.structure.why_not`). Each
schedule is handed to XLA, while rank 0 still searches the step as it is. Then it is predicted with what is known of its
ops, the most promising are profiled and searched, and those that are predicted to beat the plan are measured with the
finalists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec

from disco_hlo.cores import own_cores
from disco_hlo.elsewhere import Run, elsewhere
from disco_hlo.errors import DiscoError, ProfileError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.kernels import times as kernel_times
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.pipeline import Budget, Case, Optimized, foreseen, optimize, unsearched
from disco_hlo.optimize.regions import step_times
from disco_hlo.optimize.select import LEAST_GAIN
from disco_hlo.plan.plan import DEFAULT, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.store import PlanSlot
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.candidates import Compiling
from disco_hlo.plugin.measuring.lockstep import anywhere
from disco_hlo.plugin.measuring.profiling import profile_structures
from disco_hlo.plugin.measuring.room import (
    interpreter,
    limited_bytes,
    room_bytes,
)
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.phases.finding import all_searches_s, search_settings
from disco_hlo.plugin.phases.keeping import (
    Made,
    Ranked,
    Schedules,
    in_part,
    is_near,
    most_bytes,
    most_drafted_bytes,
    needed_bytes,
    with_room,
)
from disco_hlo.plugin.phases.making_structures import LateError, Making, Structures
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.structure import (
    Restructured,
    why_not,
)
from disco_hlo.profiler.keys import travelling
from disco_hlo.profiler.profile import Profile
from disco_hlo.profiler.store import ProfileStore
from disco_hlo.search.schedule import Scheduled
from disco_hlo.structure.propose_loops import KEPT_IN_PART_NAMES

MOST_PROFILED = 3
"""Schedules that are profiled and searched."""
MOST_STRUCTURES = 2
"""Beside a training, that take turns with XLA's default; for no more of the fastest are calls held."""
RIVALS = 0.1
"""Nor is one tried that is predicted to take longer than the first by more. In searches on GPUs, of two or three
structures each, the fastest took up to 2.3 % longer than the first, as predicted (``docs/benchmarks/*/training``)."""
_SEARCH_GAINS = 0.15
"""A schedule that is slower than the plan by more, as predicted with the best order of its kernels, is not searched."""
_UNMEASURED = 0.01
"""A schedule is profiled if kernels that no trace has shown are estimated to take more of its step."""
_LITTLE = 0.05
"""But not up to so much where the schedule is tried whether these kernels take nothing or twice their estimates: its
best plan is predicted within so much then, and measured."""
_LEAST_SHARE = 0.1
"""Of the budget, what the search of a schedule gets where those of the unchanged step took all."""
_TAKES_S = 300.0

Search = Callable[[bytes, Case, float], Scheduled]
"""Of a structure, from its module, its case and so many seconds to the best plan."""


@dataclass(frozen=True)
class StructureSearch:
    """The search over structures of one step, on one rank."""

    session: Session
    slot: PlanSlot
    store: ProfileStore | None
    unchanged: Optimized | None
    """What the searches over kernels, buckets and order found, on rank 0."""
    making: Making
    search: Search | None = None
    """Makes a search in a process of its own; None: all are made here, one after the other."""

    def trials(self, beside: Compiling | None = None) -> list[Trial]:
        """Candidates of another structure, to be measured with the others. All ranks call this; whatever goes wrong,
        all go on without.

        Args:
            beside: what is compiled while structures are made, until some are profiled.
        """
        try:
            return self._trials(beside)
        except Exception as error:
            self.session.say_failed(
                "no other structure of the step (collectives split or moved inside a layer) is tried: %s",
                one_line(error),
            )
            return []

    def _trials(self, beside: Compiling | None) -> list[Trial]:
        session, unchanged, making = self.session, self.unchanged, self.making
        settings = session.settings
        if settings.structure == "off":
            return []
        with session.stage("structure"):
            mine = ""
            if unchanged is not None and settings.forced_structure is None:
                case = unchanged.case
                mine = why_not(case, step_times(case.source, unchanged.best.strategy, case.costs))
        reason = session.tell(mine if session.leads else None, "structure")
        if reason:
            LOGGER.debug("no structure of the step is tried: %s", reason)
            return []
        structures, room = self._alike(), room_bytes(session)
        likeliest, over = self._likeliest(structures, room)
        making.make(structures, likeliest)
        promising = self._promising(structures, room, over=over)
        making.settle(structures, promising)
        made = _agreed(session, structures, promising)
        making.end()
        if beside is not None:
            beside.wait()
        room = room_bytes(session)  # now that nothing is compiled any more
        profiles = self._profiles(made, promising)
        best: dict[str, Scheduled] = {}
        takes_s = all_searches_s(settings) + _TAKES_S
        with session.stage("search of structures", takes_s=takes_s):
            if unchanged is not None:
                best = self._searched(profiles, made, room, unchanged)
        return self._told(best, made)

    def _promising(self, structures: Structures, free_bytes: int | None, *, over: bool) -> dict[str, bool]:
        """Names of the structures to be searched, on all ranks, and whether each has kernels to profile. What keeps
        more than devices have room for gives way to what keeps less, which is made now; ``over``: some of that is
        known."""
        session = self.session
        case = None if self.unchanged is None else self.unchanged.case
        with session.stage("ranking structures", takes_s=_TAKES_S):
            most = None if case is None else most_bytes(session, case, free_bytes)
            ranked = self._ranked(structures)
            fitting = with_room(session, ranked, most)
            over = over or len(fitting) < len(ranked)
            del fitting[MOST_PROFILED:]
            near = [one.name for one in fitting if is_near(one, most)]
        most, near, over = session.tell([most, near, over], "structures and memory")
        lacking = [name for name in near if needed_bytes(session, name, structures.made[name], most)[1]]
        forced = session.settings.forced_structure
        if over or lacking if forced is None else forced in KEPT_IN_PART_NAMES:
            rivals = [one.name for one in fitting if one.name not in lacking]
            make = functools.partial(self._made, structures, rivals)
            made = in_part(session, structures.early, case, most, make)
            made = {name: one for name, one in made.items() if forced in (None, name)}
            structures.made.update(made)
            with session.stage("ranking what is kept in part", takes_s=_TAKES_S):
                fitting += self._ranked(replace(structures, made=dict(made)))
        with session.stage("structures in time"):
            chosen = _rivals([one for one in sorted(fitting) if one.name not in lacking], MOST_PROFILED)
            in_time = self.making.in_time([(one.name, one.lacking) for one in chosen])
        return dict(session.tell(in_time, "promising structures"))

    def _made(self, structures: Structures, rivals: Sequence[str], schedules: Schedules) -> Made:
        """Those of ``schedules``; where calls would be held for them, only those whose drafts are predicted to be
        faster than those of their ``rivals``, which are made already and have room; told on rank 0."""
        session, worth = self.session, list(schedules)
        with session.stage("drafts of what is kept in part", takes_s=_TAKES_S):
            theirs = {name: structures.drafts[name] for name in rivals if name in structures.drafts}
            if theirs and self.unchanged is not None:
                drafts = self.making.drafts(structures.early, schedules)
                ranked = self._ranked_drafts(self.unchanged.case, {**theirs, **drafts})
                their_ns = [one.predicted_ns for one in ranked if one.name in theirs]
                if their_ns:  # where XLA refuses their drafts nobody knows
                    most_ns = (1 - LEAST_GAIN) * min(their_ns)
                    worth = [one.name for one in ranked if one.name in drafts and one.predicted_ns <= most_ns]
        worth = session.tell(worth, "worth a hold")
        if not worth:
            return {}
        found = Structures(structures.early, {name: schedules[name] for name in worth}, {})
        self.making.make(found, found.schedules)
        return found.made

    def _alike(self) -> Structures:
        """What is made, of the same schedules of the same step on all ranks."""
        with self.session.stage("schedules", takes_s=_TAKES_S):
            mine = self.making.structures()
        told = self.session.tell([mine.early.key, list(mine.schedules)], "schedules")
        with self.session.stage("early module"):
            if [mine.early.key, list(mine.schedules)] != told:
                raise ProfileError("the ranks compile different early modules")
        return mine

    def _likeliest(self, structures: Structures, free_bytes: int | None) -> tuple[list[str], bool]:
        """Names of the structures to be made while calls may be held, the same on all ranks: those with room whose
        drafts are predicted to be the fastest, and faster than that of the step as it is. And whether any has no room.
        """
        session, unchanged = self.session, self.unchanged
        mine, over = list(structures.schedules), False
        # Of all ranks, though rank 0 alone has drafts.
        with session.stage("ranking drafts of structures", takes_s=_TAKES_S):
            if structures.drafts and unchanged is not None:
                case = unchanged.case
                ranked = self._ranked_drafts(case, structures.drafts)
                if own := [one for one in ranked if one.name == DEFAULT]:
                    faster = [
                        one for one in ranked if one.predicted_ns <= own[0].predicted_ns * (1 - LEAST_GAIN)
                    ]
                    most = most_drafted_bytes(most_bytes(session, case, free_bytes))
                    fitting = with_room(session, faster, most)
                    mine = [one.name for one in _rivals(fitting, MOST_STRUCTURES)]
                    over = len(fitting) < len(faster)
        mine, over = session.tell([mine, over], "likeliest structures")
        return mine, over

    def _ranked_drafts(self, case: Case, drafts: Mapping[str, Future[CanonicalModule]]) -> list[Ranked]:
        """As :meth:`_ranked` of made ones; none has to be faster."""
        run = interpreter(case.source)

        def look(name: str) -> Ranked:
            ns, _, peak_bytes = run(foreseen, drafts[name].result(), case.costs.profile)
            return Ranked(ns, name, True, peak_bytes)

        ranked = self._looked_at(drafts, run, look)
        LOGGER.debug("drafts of structures as predicted: %s", ranked)
        return ranked

    def _ranked(self, structures: Structures) -> list[Ranked]:
        """The schedules worth a search, by what is known of their ops, the most promising first. Each is looked at as
        soon as it is made.

        What is predicted for XLA's kernels in their best order and buckets is compared with the same of the step as it
        is.
        """
        unchanged = self.unchanged
        if unchanged is None:
            return []
        step, run = unchanged.case, interpreter(unchanged.case.source)
        own, best_ns = unsearched(step).predicted_ns, unchanged.best.predicted_ns
        forced = self.session.settings.forced_structure is not None

        def look(name: str) -> Ranked:
            source = structures.made[name].result().source
            lines = kernel_times.foretold(step.costs, source, step.source)
            known = replace(step.costs.profile, ops={**lines, **step.costs.profile.ops})
            predicted_ns, unmeasured, peak_bytes = run(foreseen, source, known)
            new = not set(travelling(source)) <= set(travelling(step.source))
            lacking = unmeasured > _UNMEASURED
            if lacking and not forced and not _decides(predicted_ns, unmeasured, best_ns):
                LOGGER.debug(
                    "%s: no profile of its new kernels, %.1f%% of it, would decide", name, 100 * unmeasured
                )
                lacking = False
            return Ranked(predicted_ns, name, bool(lines) or lacking or new, peak_bytes)

        ranked = self._looked_at(structures.made, run, look)
        LOGGER.debug("structures as predicted before profiling: %s", [(ns, name) for ns, name, *_ in ranked])
        if not forced:
            LOGGER.debug(
                "predicted alike, the step as it is takes %d ns: none that is hardly faster is tried", own
            )
            ranked = [one for one in ranked if one.predicted_ns <= own * (1 - LEAST_GAIN)]
        return ranked

    def _looked_at(self, names: Iterable[str], run: Run, look: Callable[[str], Ranked]) -> list[Ranked]:
        """What ``look`` says of each, the most promising first; many at once where it runs in other interpreters. What
        raises an error is left out."""
        at_once = len(own_cores()) if run is elsewhere else 1
        with ThreadPoolExecutor(at_once, "disco-ranking") as pool:
            looked = {name: pool.submit(look, name) for name in names}
        ranked: list[Ranked] = []
        late: list[str] = []
        for name, one in looked.items():
            try:
                ranked.append(one.result())
            except LateError:
                late.append(name)
            except Exception as error:
                _say_left_out(self.session, name, error)
        if late:
            self.session.say("no time was left to compile these structures: %s", ", ".join(late))
        return sorted(ranked)

    def _profiles(
        self, made: Mapping[str, Restructured], promising: Mapping[str, bool]
    ) -> dict[str, Profile]:
        """The profiles of promising schedules, on rank 0: that of the step where it tells all. None elsewhere, nor
        where one cannot be taken."""
        session, store = self.session, self.store
        step = None if self.unchanged is None else self.unchanged.case
        lacking = {name: one for name, one in made.items() if promising[name]}
        taken = profile_structures(session, lacking, None if step is None else step.source, store, self.slot)
        profiles: dict[str, Profile] = {}
        with session.stage("profiles of structures"):
            for name in made:
                profile = taken.get(name, None if step is None else step.costs.profile)
                if isinstance(profile, Exception):
                    _say_left_out(session, name, profile)
                elif profile is not None and step is not None:
                    lines = kernel_times.foretold(step.costs, made[name].source, step.source)
                    profiles[name] = replace(profile, ops={**lines, **profile.ops})
                    if store is not None and name in lacking:
                        kernel_times.keep(store, profile, made[name].source)
        return profiles

    def _searched(
        self,
        profiles: Mapping[str, Profile],
        made: Mapping[str, Restructured],
        room: int | None,
        unchanged: Optimized,
    ) -> dict[str, Scheduled]:
        """The best plan for each schedule that is worth a search, on rank 0.

        They share evenly what the searches of the unchanged step left of the time that all searches may take; in
        processes of their own, as many run at once, for as long as one would, as have a core for each restart. A plan
        may need a little more memory than what XLA makes of the schedule; whether the device has that is asked before
        any is run.
        """
        session, settings = self.session, self.session.settings
        starts: dict[str, tuple[Case, Scheduled]] = {}
        for name, profile in profiles.items():
            source = made[name].source
            try:
                xla = read(source)
                left = limited_bytes(settings, room, source.graph)
                case = Case(source, xla, costs_of(profile, source, [xla]), left)
                starts[name] = case, unsearched(case)
            except Exception as error:
                _say_left_out(session, name, error)
        most_ns = (1 + _SEARCH_GAINS) * unchanged.best.predicted_ns
        forced = settings.forced_structure is not None
        worth = [name for name, (_, start) in starts.items() if forced or start.predicted_ns <= most_ns]
        left_s = all_searches_s(settings) - unchanged.search_s
        each_s = max(left_s / max(1, -(-len(worth) // self._at_once)), _LEAST_SHARE * settings.budget_s)
        for name in worth:
            more_bytes = starts[name][0].default.peak_bytes - unchanged.case.default.peak_bytes
            session.say("%s: predicted to need %+.0f MiB on each device", name, more_bytes / 2**20)
        found = self._searches({name: (made[name].module, *starts[name]) for name in worth}, each_s)
        best: dict[str, Scheduled] = {}
        for name, one in found.items():
            try:
                best[name] = one()
            except Exception as error:
                _say_left_out(session, name, error)
        return best

    def _searches(
        self, wanted: Mapping[str, tuple[bytes, Case, Scheduled]], seconds: float
    ) -> dict[str, Callable[[], Scheduled]]:
        """What gives the best plan of each, from its module, its case and the plan that it begins with: here when it is
        asked for, where Ctrl-C comes, and else at the end of searches side by side."""
        settings = replace(search_settings(self.session.settings), finalists=1)
        search = self.search
        if search is None:

            def now(_: bytes, case: Case, start: Scheduled) -> Scheduled:
                return optimize(case, settings, Budget.of(seconds), also=[start.strategy]).best

            return {name: functools.partial(now, *one) for name, one in wanted.items()}

        def beside(module: bytes, case: Case, start: Scheduled) -> Scheduled:
            try:
                found = search(module, case, seconds)
            except (DiscoError, OSError) as error:
                LOGGER.debug("a structure keeps XLA's kernels in our order: %s", one_line(error))
                return start
            return min(found, start, key=lambda one: one.predicted_ns)

        with ThreadPoolExecutor(self._at_once, "disco-searches") as pool:
            return {name: pool.submit(beside, *one).result for name, one in wanted.items()}

    @property
    def _at_once(self) -> int:
        """How many structures are searched at once."""
        restarts = search_settings(self.session.settings).seeds
        return 1 if self.search is None else max(1, len(own_cores()) // restarts)

    def _told(self, best: Mapping[str, Scheduled], made: Mapping[str, Restructured]) -> list[Trial]:
        """The candidates on every rank: those predicted to beat the plan, or the one that is forced."""
        session, unchanged = self.session, self.unchanged
        kept = [
            [name, msgspec.to_builtins(one.strategy), one.predicted_ns]
            for name, one in best.items()
            if session.settings.forced_structure
            or (unchanged is not None and one.predicted_ns < unchanged.best.predicted_ns)
        ]
        trials = []
        for name, strategy, predicted_ns in session.tell(kept, "restructured finalists"):
            plan = msgspec.convert(strategy, Strategy)
            trials.append(Trial(name, plan, predicted_ns, marks=self.slot, restructured=made[name]))
        if trials:
            session.say("structures to measure: %s", ", ".join(trial.name for trial in trials))
        return trials


def _agreed(session: Session, mine: Structures, names: Iterable[str]) -> dict[str, Restructured]:
    """Those that all ranks have made, as rank 0 has."""
    agreed = {}
    for name in names:
        try:
            with session.stage(f"structure {name}", takes_s=_TAKES_S):
                made = mine.made[name].result()
            agreed[name] = as_rank_0(session, name, made)
        except Exception as error:
            _say_left_out(session, name, error)
    return agreed


def as_rank_0(session: Session, name: str, mine: Restructured) -> Restructured:
    """A structure as XLA has made it on rank 0. Elsewhere its autotuner may have picked other kernels, and all ranks
    run one module.

    Raises:
        ActivationError: ranks were silent, or cannot read what rank 0 has made; the same on all.
    """
    result = session.tell(mine.record.result, f"result of {name}")
    if not anywhere(session, mine.record.result != result, f"another {name}"):
        return mine
    sent = session.channel.broadcast(
        mine.module if session.leads else None, tag=f"module of {name}", timeout_s=session.timeout_s
    )
    with session.stage(f"rank 0's {name}"):
        source = mine.source if mine.record.result == result else canonicalize(sent)
        if source.graph.key != result:
            raise ProfileError(f"what rank 0 sent is {source.graph.key[:16]}, expected {result[:16]}")
    return replace(
        mine, module=sent, source=source, record=msgspec.structs.replace(mine.record, result=result)
    )


def _say_left_out(session: Session, name: str, error: Exception) -> None:
    """A schedule that does not work is nothing to the user, unless it is the one asked for."""
    if name == session.settings.forced_structure:
        session.say_failed("%s is not tried: %s", name, one_line(error))
    else:
        LOGGER.debug("%s: %s", name, one_line(error))


def _rivals(ranked: Sequence[Ranked], most: int) -> list[Ranked]:
    """The first few, the most promising first, that may be the best."""
    return [one for one in ranked[:most] if one.predicted_ns <= (1 + RIVALS) * ranked[0].predicted_ns]


def _decides(predicted_ns: int, unmeasured: float, best_ns: int) -> bool:
    """Whether a profile could decide if a schedule is searched and tried, which the best plan so far takes ``best_ns``
    to beat: kernels that no trace has shown, of this share of it, take anything from nothing to twice their estimates.
    """
    unsure_ns = unmeasured * predicted_ns
    is_tried = unmeasured <= _LITTLE and predicted_ns + unsure_ns < best_ns
    return not is_tried and predicted_ns - unsure_ns <= (1 + _SEARCH_GAINS) * best_ns
