"""Several profiles of one machine as one: what the layers of several models, or several hours, tell of it.

Op times are merged by key, by the weighted medians of the store. Profiles that were read from one store hold
each other's measurements: one that stands in several of them counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from disco_hlo.errors import ProfileError
from disco_hlo.profiler.allreduce import MINIMUM_POINTS, AllReduceFit, SweepPoint, fit
from disco_hlo.profiler.in_step import InStep
from disco_hlo.profiler.profile import Collectives, Contention, LoopTime, OpTime, Profile, merged


def merge(profiles: Sequence[Profile]) -> Profile:
    """One profile from several of the same platform and link.

    Rates and launch cost are medians, the noise is the largest. The slow-downs are medians over those that
    found any: 1.0 and 1.0 is also what a profile says whose traces could not tell. That of collectives holds their wait
    where this is 0: where any profile tells the two apart, both are medians over those that do.

    Raises:
        ProfileError: there are none, or they were taken on different platforms or links.
    """
    if not profiles:
        raise ProfileError("there is no profile to merge")
    first = profiles[0]
    for other in profiles[1:]:
        if (other.platform, other.link) != (first.platform, first.link):
            raise ProfileError(
                f"profiles of one platform and link are expected: the first is of {first.platform}, "
                f"{first.link}, another of {other.platform}, {other.link}"
            )
    times: dict[str, dict[OpTime, None]] = {}
    for profile in profiles:
        for key, time in profile.ops.items():
            times.setdefault(key, {})[time] = None
    return Profile(
        platform=first.platform,
        ops={key: merged(tuple(times[key])) for key in sorted(times)},
        launch_ns=round(median(profile.launch_ns for profile in profiles)),
        memory_bandwidth=float(median(profile.memory_bandwidth for profile in profiles)),
        flops_per_s=float(median(profile.flops_per_s for profile in profiles)),
        all_reduce=_swept(profile.all_reduce for profile in profiles),
        link=first.link,
        contention=_contention(profiles),
        holds=_holds(profiles),
        noise=max(profile.noise for profile in profiles),
        in_step=_in_step(profile.in_step for profile in profiles),
        together=_in_step(profile.together for profile in profiles),
        collectives=_collectives(profiles),
        loops=_loops(profiles),
    )


def _collectives(profiles: Sequence[Profile]) -> dict[str, Collectives]:
    kinds = sorted({kind for profile in profiles for kind in profile.collectives})
    by_kind = {kind: [one.collectives[kind] for one in profiles if kind in one.collectives] for kind in kinds}
    return {
        kind: Collectives(
            _swept(one.swept for one in known),
            _in_step(one.in_step for one in known),
            _in_step(one.together for one in known),
        )
        for kind, known in by_kind.items()
    }


def _loops(profiles: Sequence[Profile]) -> dict[str, LoopTime]:
    """Of loops that ran as often in all profiles that have them."""
    found: dict[str, list[LoopTime]] = {}
    for profile in profiles:
        for body, one in profile.loops.items():
            found.setdefault(body, []).append(one)
    return {
        body: LoopTime(
            known[0].executions,
            round(median(one.own_ns for one in known)),
            round(median(one.first_more_ns for one in known)),
        )
        for body, known in sorted(found.items())
        if len({one.executions for one in known}) == 1
    }


def _swept(fits: Iterable[AllReduceFit | None]) -> AllReduceFit | None:
    found: dict[SweepPoint, None] = {}
    for one in fits:
        if one is not None:
            found |= dict.fromkeys(one.points)
    by_size: dict[int, list[OpTime]] = {}
    for point in found:
        time = OpTime(point.median_ns, point.spread_ns, point.samples)
        by_size.setdefault(point.size_bytes, []).append(time)
    points = []
    for size, times in sorted(by_size.items()):
        time = merged(times)
        points.append(SweepPoint(size, time.median_ns, time.spread_ns, time.samples))
    return fit(points) if len(points) >= MINIMUM_POINTS else None


def _in_step(found: Iterable[InStep | None]) -> InStep | None:
    """Of one step. Profiles of several steps tell of none of them."""
    known = dict.fromkeys(one for one in found if one is not None)
    steps = {one.sizes for one in known}
    if len(steps) != 1:
        return None
    time = merged([OpTime(one.total_ns, one.spread_ns, one.samples) for one in known])
    return InStep(steps.pop(), time.median_ns, time.spread_ns, time.samples)


def _contention(profiles: Sequence[Profile]) -> Contention | None:
    known = [profile.contention for profile in profiles if profile.contention is not None]
    told = [one for one in known if one != Contention(1.0, 1.0)] or known
    if not told:
        return None
    apart = [one for one in told if one.transfer_wait_ns] or told
    products = [one.products for one in told if one.products is not None]
    others = [one.others for one in told if one.others is not None]
    return Contention(
        median(one.compute for one in told),
        median(one.communication for one in apart),
        round(median(one.transfer_wait_ns for one in apart)),
        median(products) if products else None,
        median(others) if others else None,
        median(one.hold for one in told),
    )


def _holds(profiles: Sequence[Profile]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for profile in profiles:
        for key, share in profile.holds.items():
            found.setdefault(key, []).append(share)
    return {key: median(found[key]) for key in sorted(found)}
