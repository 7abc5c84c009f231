"""``disco simulate``: what a step takes, where the time goes, what it would take elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import UNSET

from disco_hlo.cli.modules import Opened, open_named
from disco_hlo.cli.options import AsJson, ModulePath, ProfilePath
from disco_hlo.cli.output import (
    add_row,
    check_places,
    is_stdout,
    plan_directory,
    print_json,
    show,
    table,
    warn_all,
    write_file,
)
from disco_hlo.errors import DiscoError, PlanError
from disco_hlo.hlo.inner_collectives import inner_collectives, not_simulated
from disco_hlo.optimize.costs import Costs, costs_for
from disco_hlo.optimize.gains import Gain, gains
from disco_hlo.optimize.network import Network
from disco_hlo.optimize.predict import Predicted, lower_bound, predict
from disco_hlo.plan.read import read, repeats
from disco_hlo.plan.strategy import Strategy
from disco_hlo.profiler.profile import load
from disco_hlo.report.bundle import locate, open_bundle
from disco_hlo.report.printable import printable, size_text, time_text
from disco_hlo.simulator.bound import Bound
from disco_hlo.simulator.timeline import Timeline
from disco_hlo.simulator.trace import chrome_trace
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
    machine: Annotated[str | None, typer.Option(metavar="NAME", help=_MACHINE_HELP)] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a step: compute, communication, overlap, bound; also on another network or machine (what if)."""
    aside = check_places({"--trace": trace}, as_json=as_json)
    imagined = None if machine is None else _machine(machine, gpus, bandwidth, latency)
    network = _network(gpus, bandwidth, latency) if imagined is None else None
    opened = open_named(module)
    graph = opened.source.graph
    if imagined is not None and graph.backend != "gpu":
        raise DiscoError(f"--machine {machine} has GPUs; this module was compiled for {graph.backend}")
    strategies = {"XLA default": read(opened.source)}
    if plan is not None:
        strategies["plan"] = _strategy(opened, plan)
    known = opened.profile if profile is None else load(profile)
    costs = costs_for(graph, known, opened.device_kind, list(strategies.values()))
    if imagined is not None:
        costs = costs.on(*imagined)
    costs = costs.imagine(network) if network else costs
    try:
        found = {
            name: predict(graph, strategy, costs, () if name == "plan" else repeats(opened.source))
            for name, strategy in strategies.items()
        }
    except DiscoError as error:
        if network is None:
            raise
        raise DiscoError(f"{error} Is {network} what you meant?") from error
    limit = lower_bound(graph, list(strategies.values()), costs)
    last = list(found)[-1]
    gained = [] if imagined is None else gains(graph, found[last], costs, imagined[1])
    if trace is not None:
        title = f"{printable(graph.module_name)}: {last}"
        body = chrome_trace(found[last].timeline, title)
        write_file(trace, json.dumps(body, separators=(",", ":")).encode())
    inner = not_simulated(opened.source.index)
    silent = (
        () if graph.all_reduces or inner else ("the step has no all-reduce: no network changes its time",)
    )
    warn_all((*opened.missing, *costs.lines, *inner, *silent))
    if as_json:
        print_json(_as_json(opened, costs, network, found, limit) | _gains_as_json(imagined, gained))
        return
    _print(found, limit, aside)
    if gained:
        _print_gains(last, found[last].timeline.makespan_ns, gained, aside)
    if trace is not None and not is_stdout(trace):
        show(f"trace of {last}: {printable(str(trace))} (open it in ui.perfetto.dev)")


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
        raise PlanError(
            f"{bundle.path} is a plan for {bundle.plan.target.module_name!r} "
            f"({bundle.plan.target.key[:16]}), this module is {opened.source.graph.module_name!r} "
            f"({opened.source.graph.key[:16]})"
        )
    return bundle.strategy


def _print(found: dict[str, Predicted], limit: Bound, aside: bool) -> None:
    made = table("", *found, right=(1, 2))
    rows: list[tuple[str, Any]] = [
        ("step", lambda t: time_text(t.makespan_ns)),
        ("  compute", lambda t: time_text(t.compute_ns)),
        ("  communication", lambda t: time_text(t.communication_ns)),
        ("  overlap", lambda t: time_text(t.overlap_ns)),
        ("  exposed communication", lambda t: time_text(t.exposed_ns)),
        ("peak memory", lambda t: size_text(t.peak_bytes)),
    ]
    for name, text in rows:
        add_row(made, name, *(text(one.timeline) for one in found.values()))
    show(made, "", aside=aside)
    show(
        f"no order and no buckets can beat {time_text(limit.makespan_ns)} with these kernels "
        f"(compute before the first all-reduce {time_text(limit.before_ns)}, communication at least "
        f"{time_text(limit.communication_ns)}, compute after the last {time_text(limit.after_ns)}); "
        f"full overlap, the looser bound: {time_text(limit.full_overlap_ns)}",
        aside=aside,
    )
    if len(found) > 1:
        default, plan = (one.timeline.makespan_ns for one in found.values())
        show(f"speed-up predicted: {default / plan:.2f}x", aside=aside)


def _print_gains(name: str, now_ns: int, gained: list[Gain], aside: bool) -> None:
    made = table("what would be gained on", name, "step", "faster", right=(2, 3))
    for one in gained:
        add_row(made, one.name, one.told, time_text(one.step_ns), f"{now_ns / max(1, one.step_ns):.2f}x")
    show(made, "", aside=aside)


def _gains_as_json(imagined: tuple[Machine, int] | None, gained: list[Gain]) -> dict[str, Any]:
    if imagined is None:
        return {}
    machine, devices = imagined
    return {
        "machine": {"name": machine.name, "gpus": devices, "assumed": list(machine.assumed)},
        "gains": {one.name: one.step_ns for one in gained},
    }


def _as_json(
    opened: Opened, costs: Costs, network: Network | None, found: dict[str, Predicted], limit: Bound
) -> dict[str, Any]:
    graph = opened.source.graph
    times = {name: _times(one.timeline) for name, one in found.items()}
    return {
        "module": graph.module_name,
        "fingerprint": graph.fingerprint,
        "backend": graph.backend,
        "costs": list(costs.lines),
        "collectives_not_simulated": inner_collectives(opened.source.index),
        "what_if": None if network is None else {
            "gpus": network.devices, "bandwidth_gb_per_s": network.gigabytes_per_s, "latency_us": network.latency_us,
        },
        "default": times["XLA default"],
        "plan": times.get("plan"),
        "bound": {
            "bound_ns": limit.makespan_ns,
            "full_overlap_ns": limit.full_overlap_ns,
            "compute_ns": limit.compute_ns,
            "before_first_all_reduce_ns": limit.before_ns,
            "communication_ns": limit.communication_ns,
            "after_last_all_reduce_ns": limit.after_ns,
        },
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
