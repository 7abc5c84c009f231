"""``disco simulate``: what a step takes, where the time goes, what it would take elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import UNSET

from disco_hlo.backends import BACKENDS
from disco_hlo.cli.inputs import AsJson, ModulePath, Opened, ProfilePath, RegionName, open_named
from disco_hlo.cli.output import (
    add_row,
    check_places,
    is_stdout,
    plan_directory,
    print_json,
    region_table,
    regions_as_json,
    say,
    show,
    table,
    warn_all,
    write_file,
)
from disco_hlo.errors import DiscoError, PlanError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.regions import ENTRY, inner_collectives, not_simulated
from disco_hlo.optimize.costs import Costs, Network, costs_for
from disco_hlo.optimize.gains import Gain, gains
from disco_hlo.optimize.regions import StepTimes, lower_bound, step_times
from disco_hlo.optimize.sends import sends_ns, sends_of
from disco_hlo.plan.plan import DEFAULT, Strategy
from disco_hlo.plan.read import read
from disco_hlo.printable import Strings, printable, size_text, time_text
from disco_hlo.profiler.profile import load
from disco_hlo.report.bundle import locate, open_bundle
from disco_hlo.report.regions import (
    PLAN,
    RegionFacts,
    check_region,
    region_facts,
    region_names,
)
from disco_hlo.report.timelines import chrome_trace, timeline_data
from disco_hlo.simulator.bound import Bound
from disco_hlo.simulator.timeline import Timeline
from disco_hlo.whatif.machine import Machine
from disco_hlo.whatif.machine import load as load_machine
from disco_hlo.whatif.machine import names as machine_names

DEFAULT_LATENCY_US = 10.0
_BANDWIDTH_HELP = "What if: GB/s of each GPU's link, in each direction (100 GbE is 12.5)."
_MACHINE_HELP = (
    f"What if: the step on a machine, {', '.join(machine_names())}, or a file *.toml; --gpus says how many."
)
_LATENCY_HELP = f"What if: microseconds that a message takes; {DEFAULT_LATENCY_US:g} where not given."


def simulate(
    module: ModulePath,
    plan: Annotated[
        str | None, typer.Option(metavar="PLAN", help="A plan of this step, beside XLA's own.")
    ] = None,
    profile: ProfilePath = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a Chrome trace (ui.perfetto.dev) here; - is stdout."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=2, max=1 << 20, help="What if: this many GPUs.")] = None,
    bandwidth: Annotated[float | None, typer.Option(min=1e-6, max=1e6, help=_BANDWIDTH_HELP)] = None,
    latency: Annotated[float | None, typer.Option(min=0, max=1e9, help=_LATENCY_HELP)] = None,
    region: RegionName = ENTRY,
    machine: Annotated[str | None, typer.Option(metavar="NAME", help=_MACHINE_HELP)] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a step: compute, communication, overlap, bound; also on another network or machine (what if)."""
    aside = check_places({"--trace": trace}, as_json=as_json)
    imagined = None if machine is None else _machine(machine, gpus, bandwidth, latency)
    network = _network(gpus, bandwidth, latency) if imagined is None else None
    opened = open_named(module)
    source, graph = opened.source, opened.source.graph
    check_region(region, region_names(source))
    if imagined is not None and not BACKENDS[graph.backend].machines_described:
        raise DiscoError(f"--machine {machine} has GPUs; this module was compiled for {graph.backend}")
    strategies = {DEFAULT: read(source)}
    if plan is not None:
        strategies[PLAN] = _strategy(opened, plan)
    known = opened.profile if profile is None else load(profile)
    costs = costs_for(source, known, opened.device_kind, list(strategies.values()))
    costs = costs.on(*imagined) if imagined else costs.imagine(network) if network else costs
    try:
        found = {
            name: step_times(source, strategy, costs, as_compiled=name == DEFAULT)
            for name, strategy in strategies.items()
        }
    except DiscoError as error:
        if network is None:
            raise
        raise DiscoError(f"{error} Is {network} what you meant?") from error
    limit = lower_bound(source, list(strategies.values()), costs, region)
    last = list(found)[-1]
    gained = {} if imagined is None else gains(source, found[last], imagined[1])
    if trace is not None:
        events = _trace(source, last, found[last], region)
        write_file(trace, json.dumps(events, separators=(",", ":")).encode())
    inner = not_simulated(source)
    warn_all((*opened.missing, *costs.lines, *inner, *_unknown_trips(source)))
    if not inner and not any(one.graph.collectives for one in source.computations.values()):
        say("the step has no collective that a bucket could have: no network changes its time")
    regions = region_facts(source, found[DEFAULT])
    if PLAN in found:
        regions = region_facts(source, found[PLAN], strategies[PLAN], found[DEFAULT])
    is_whole = region == ENTRY
    exposed = {name: one.exposed_ns for name, one in found.items() if source.regions and is_whole}
    shown_graph = source.computations[region].graph
    sent = {
        name: sum(sends_ns(shown_graph, one.costs[region]).values())
        for name, one in found.items()
        if sends_of(shown_graph)
    }
    timelines = {name: one.predicted[region].timeline for name, one in found.items()}
    if as_json:
        made = _as_json(opened, costs, network, region, timelines, limit, regions)
        print_json(made | _gains_as_json(imagined, gained, region))
        return
    show(*region_table(regions), aside=aside)
    _print("step" if is_whole else f"one execution of {region}", timelines, sent, exposed, limit, aside)
    if gained:
        shown = region_names(source) if is_whole else (region,)
        now_ns = {name: one.timeline.makespan_ns for name, one in found[last].predicted.items()}
        _print_gains(last, now_ns, {name: gained[name] for name in shown}, aside)
    if trace is not None and not is_stdout(trace):
        show(f"trace of {last}: {printable(str(trace))} (open it in ui.perfetto.dev)")


def _unknown_trips(source: CanonicalModule) -> list[str]:
    """A line for loops whose body is simulated and which nobody knows to run how often."""
    names = ", ".join(one.name for one in source.regions if any(call.trips is None for call in one.calls))
    said = f"how often {names} runs is not known: in the step such a loop takes what is estimated"
    return [said] if names else []


def _trace(source: CanonicalModule, who: str, times: StepTimes, region: str) -> dict[str, Any]:
    """The step and one execution of each of its regions; or of one alone."""
    wanted = region_names(source) if region == ENTRY else (region,)
    module, strings = printable(source.graph.module_name), Strings()
    steps = [
        (
            f"{module}: {who}" if name == ENTRY else f"{module}: {who}, {name}",
            timeline_data(source.computations[name].graph, times.predicted[name], strings),
        )
        for name in wanted
    ]
    return chrome_trace(module, steps, strings.as_list())


def _network(gpus: int | None, bandwidth: float | None, latency: float | None) -> Network | None:
    if gpus is None and bandwidth is None and latency is None:
        return None
    if gpus is None or bandwidth is None:
        raise DiscoError("a what-if needs both --gpus and --bandwidth (GB/s of each GPU's link)")
    return Network(gpus, bandwidth, DEFAULT_LATENCY_US if latency is None else latency)


def _machine(
    name: str, gpus: int | None, bandwidth: float | None, latency: float | None
) -> tuple[Machine, int]:
    if bandwidth is not None or latency is not None:
        raise DiscoError("--machine says what joins the GPUs; leave out --bandwidth and --latency")
    machine = load_machine(name)
    return machine, machine.network.devices if gpus is None else gpus


def _strategy(opened: Opened, name: str) -> Strategy:
    bundle = open_bundle(locate(name, plan_directory()), opened.source)
    structure = bundle.plan.structure
    if structure is not UNSET and bundle.source is None:
        raise PlanError(
            f"{bundle.path} changes the step's structure ({structure.name}): simulate it on its own module, the "
            "module.hlo.pb beside it"
        )
    if bundle.source is None:
        other, graph = bundle.plan.target, opened.source.graph
        raise PlanError(
            f"{bundle.path} is a plan for {other.module_name!r} ({other.key[:16]}), this module is "
            f"{graph.module_name!r} ({graph.key[:16]})"
        )
    return bundle.strategy


def _print(
    first: str,
    timelines: dict[str, Timeline],
    sent: dict[str, int],
    exposed: dict[str, int],
    limit: Bound,
    aside: bool,
) -> None:
    made = table("", *timelines, right=(1, 2))
    rows: list[tuple[str, Any]] = [
        (first, lambda t: time_text(t.makespan_ns)),
        ("  compute", lambda t: time_text(t.compute_ns)),
        ("  communication", lambda t: time_text(t.communication_ns)),
        ("  overlap", lambda t: time_text(t.overlap_ns)),
        ("  exposed communication", lambda t: time_text(t.exposed_ns)),
        ("peak memory", lambda t: size_text(t.peak_bytes)),
    ]
    for name, text in rows:
        add_row(made, name, *map(text, timelines.values()))
    if sent:
        add_row(made, "sends", *map(time_text, sent.values()))
    if exposed:
        add_row(made, "exposed in all regions", *map(time_text, exposed.values()))
    show(made, "", aside=aside)
    show(
        f"no order and no buckets can beat {time_text(limit.makespan_ns)} with these kernels "
        f"(compute before the first collective {time_text(limit.before_ns)}, communication at least "
        f"{time_text(limit.communication_ns)}, compute after the last {time_text(limit.after_ns)}); "
        f"full overlap, the looser bound: {time_text(limit.full_overlap_ns)}",
        aside=aside,
    )
    if len(timelines) > 1:
        default, plan = (one.makespan_ns for one in timelines.values())
        show(f"speed-up predicted: {default / plan:.2f}x", aside=aside)


def _print_gains(name: str, now_ns: dict[str, int], gained: dict[str, dict[str, Gain]], aside: bool) -> None:
    made = table("region", "what would be gained on", name, "one takes", "faster", right=(3, 4))
    for region, of_one in gained.items():
        for number, (mechanism, one) in enumerate(of_one.items()):
            faster = f"{now_ns[region] / max(1, one.step_ns):.2f}x"
            add_row(made, "" if number else region, mechanism, one.told, time_text(one.step_ns), faster)
    show(made, "", aside=aside)


def _gains_as_json(
    imagined: tuple[Machine, int] | None, gained: dict[str, dict[str, Gain]], region: str
) -> dict[str, Any]:
    if imagined is None:
        return {}
    machine, devices = imagined
    times = {name: {mechanism: one.step_ns for mechanism, one in of.items()} for name, of in gained.items()}
    return {
        "machine": {"name": machine.name, "gpus": devices, "assumed": list(machine.sourced("assumed"))},
        "gains": times[region],
        "gains_by_region": times,
    }


def _as_json(
    opened: Opened,
    costs: Costs,
    network: Network | None,
    region: str,
    timelines: dict[str, Timeline],
    limit: Bound,
    regions: list[RegionFacts],
) -> dict[str, Any]:
    graph = opened.source.graph
    times = {name: _times(timeline) for name, timeline in timelines.items()}
    return {
        "module": graph.module_name,
        "fingerprint": graph.fingerprint,
        "backend": graph.backend,
        "costs": list(costs.lines),
        "collectives_not_simulated": inner_collectives(opened.source),
        "what_if": None if network is None else {
            "gpus": network.devices, "bandwidth_gb_per_s": network.gigabytes_per_s, "latency_us": network.latency_us,
        },
        "region": region,
        "default": times[DEFAULT],
        "plan": times.get(PLAN),
        "bound": {
            "bound_ns": limit.makespan_ns,
            "full_overlap_ns": limit.full_overlap_ns,
            "compute_ns": limit.compute_ns,
            "before_first_collective_ns": limit.before_ns,
            "communication_ns": limit.communication_ns,
            "after_last_collective_ns": limit.after_ns,
        },
        "regions": regions_as_json(regions),
        "missing": list(opened.missing),
    }  # fmt: skip


def _times(timeline: Timeline) -> dict[str, int]:
    return {
        "step_ns": timeline.makespan_ns,
        "compute_ns": timeline.compute_ns,
        "communication_ns": timeline.communication_ns,
        "overlap_ns": timeline.overlap_ns,
        "exposed_ns": timeline.exposed_ns,
        "peak_bytes": timeline.peak_bytes,
    }
