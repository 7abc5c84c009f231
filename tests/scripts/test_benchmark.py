"""The evaluation: a record that survives kills, rows that fail without stopping others, and runs that resume."""

from __future__ import annotations

import functools
import gzip
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluation import cell, measure, rows, running, step
from evaluation.commands import prepare
from evaluation.predicting import Ran, predict_in_rounds, predicted, with_took
from evaluation.record import ALONE_XLA, CellName, Record, RecordError, read
from evaluation.rows import best_threshold_bytes, chosen_names
from evaluation.strategies import block_cuts, bucketed_per_block, combined_up_to, random_strategy

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.collectives import ALL_REDUCE, collective_bytes, collective_kind
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.hlo.graph import Graph
from disco_hlo.optimize.costs import Costs
from disco_hlo.optimize.pipeline import Case
from disco_hlo.plan.apply import apply
from disco_hlo.plan.legal import check_order, check_strategy
from disco_hlo.plan.plan import DEFAULT, Bucket, Prediction, Strategy
from disco_hlo.plan.read import read as read_strategy
from disco_hlo.plan.read import verify
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import one_at_a_time, one_bucket, unfused
from disco_hlo.plugin.step import Step
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.profiler.collectives import CollectiveFit, InStep, fit, point_of
from disco_hlo.profiler.profile import Collectives, Platform, Profile
from disco_hlo.search.schedule import Scheduled
from tests.captured import captured
from tests.cost_models import MadeUpCosts
from tests.hlo.small_modules import module_of
from tests.hlo.test_collectives import STEP as SHARDED
from tests.steps import models
from tests.steps.intercept import intercept

SCRIPTS = Path(__file__).parents[2] / "scripts"
CELL = CellName("transformer", "tiny", "nvlink", 2)


# --- the record -----------------------------------------------------------------------------------


def test_a_record_is_whole_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(SCRIPTS)!r})
from pathlib import Path
from evaluation.record import CellName, Record
record = Record.open(Path({str(tmp_path)!r}), CellName("bert", "tiny", "nvlink", 2))
for number in range(10**6):
    record.update(f"row {{number}}", status="ok", times_ms=[1.0] * 50)
    print(number, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        done = [int(writer.stdout.readline()) for _ in range(20)][-1]
        writer.send_signal(signal.SIGKILL)
    rows = read(tmp_path / "bert-tiny-nvlink-2.json")["rows"]
    assert [rows[f"row {number}"]["status"] for number in range(done + 1)] == ["ok"] * (done + 1)


def test_a_row_that_ended_the_process_twice_is_given_up(tmp_path: Path) -> None:
    Record.open(tmp_path, CELL).begin("plan", "plan")
    once = Record.open(tmp_path, CELL)
    assert not once.finished("plan")
    once.begin("plan", "plan")
    twice = Record.open(tmp_path, CELL)
    assert twice.finished("plan")
    assert twice.row("plan")["reason"] == "the process ended 2 times while it was compiled or run"


def test_a_row_that_ran_out_of_time_may_be_tried_again(tmp_path: Path) -> None:
    record = Record.open(tmp_path, CELL)
    record.begin("plan", "plan")
    record.stop("the time was up")
    again = Record.open(tmp_path, CELL)
    assert not again.finished("plan")
    assert again.row("plan") == {
        "kind": "plan", "status": "no time", "attempts": 0, "reason": "the time was up",
    }  # fmt: skip


def test_a_row_whose_first_run_hangs_is_given_up(tmp_path: Path) -> None:
    record = Record.open(tmp_path, CELL)
    record.begin("plan", "plan")
    record.update("plan", first_run_began=time.time() - 100)
    record.stop("the time was up")
    assert Record.open(tmp_path, CELL).row("plan")["status"] == "failed"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read"),
        ("[]", "is no disco-hlo evaluation of version 1"),
        ('{"format": "disco-hlo evaluation", "version": 2}', "is no disco-hlo evaluation of version 1"),
        ('{"format": "disco-hlo evaluation", "version": 1, "cell": {}, "facts": {}}', "rows is NoneType"),
    ],
)
def test_a_file_that_is_no_record_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / f"{CELL.stem}.json").write_text(content)
    with pytest.raises(RecordError, match=message):
        Record.open(tmp_path, CELL)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jaxlib", "flags"),
    [
        ("0.10.2", "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"),
        (
            "0.12.0.1",
            "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false --xla_gpu_experimental_use_collective_kernels=",
        ),
    ],
)
def test_slower_links_are_nccl_s_environment_and_no_kernels_that_go_past_it(
    jaxlib: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _name: jaxlib)
    environment = {"NCCL_P2P_DISABLE": "1", "ENABLE_SEARCH": "1", "NCCL_NVLS_ENABLE": "0"}
    prepare(environment, "nvlink", 2)
    assert environment == {"NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": "0,1"}
    prepare(environment, "sockets", 2)
    assert environment == {
        "NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4",
        "XLA_FLAGS": flags,
    }  # fmt: skip
    again = dict(environment)
    prepare(again, "sockets", 2)
    assert again == environment


def test_row_names_are_checked_before_anything_runs() -> None:
    assert chosen_names("all") == set()
    assert chosen_names("plan 2, threshold 32 MiB") == {"plan 2", "threshold 32 MiB"}
    assert {"XLA default", "plan", "PGLE", "O1"} <= chosen_names("minimum,O1")
    assert {"plan", "threshold 256 MiB", "XLA's pipelined collectives"} < chosen_names("xla, plan")
    assert not [name for name in rows._NAMES if "," in name], "--rows could not name it"
    with pytest.raises(ValueError, match="no row is called 'nonsense'"):
        chosen_names("plan,nonsense")


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def request_and_module() -> tuple[CompileRequest, bytes]:
    made, arguments = models.mlp()
    request: CompileRequest = intercept(made, arguments, lambda request: request)
    return request, compiles.capture(request)


def profile() -> Profile:
    points = tuple(point_of(size, [200_000 + size] * 3) for size in (1 << 10, 1 << 14, 1 << 18))
    return Profile(Platform("cpu", "cpu", "", "0", "0"), {}, 1000, 1e10, 1e11, all_reduce=fit(points))


def kept_files(out: Path, cell: CellName, module: bytes) -> None:
    """What profiling and searching would have left: one good plan, one that forgets the gradients."""
    graph = canonicalize(module).graph
    good = one_bucket(graph, read_strategy(canonicalize(module)).groups)
    prediction = Prediction(900_000, 1_000_000, 2_000_000, 500_000, 600_000, 1 << 20)
    found = (("plan", good, 900_000), ("plan 2", Strategy(), 950_000))
    files = step.Files(out, cell)
    files.save_profile(profile())
    files.save_plans(step.FoundPlans(graph.fingerprint, found, prediction, 10, 0.5))


@pytest.fixture
def kept(
    request_and_module: tuple[CompileRequest, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CanonicalModule:
    """The step of a cell that was profiled and searched before."""
    request, module = request_and_module
    monkeypatch.setattr(step, "request_of", lambda model, size: request)
    kept_files(tmp_path, CELL, module)
    return canonicalize(module)


def run(out: Path, rows: str, seconds: float = 1e6, **more: Any) -> int:
    started = time.monotonic()
    values = {
        "models": ["transformer"], "link": "nvlink", "devices": 2, "size": "tiny", "rows": rows, "rounds": 3,
        "seconds": seconds, "search_seconds": 1.0, "finalists": 2, "seed": 0, "out": out,
        "log": "warning", "one_by_one": False,
    }  # fmt: skip
    args = Namespace(**{**values, **more})
    return running.run(args, lambda: args.seconds - (time.monotonic() - started))


def statuses(record: dict[str, Any]) -> dict[str, str]:
    return {name: row["status"] for name, row in record["rows"].items()}


def test_a_run_measures_resumes_and_records_what_fails(kept: CanonicalModule, tmp_path: Path) -> None:
    path = tmp_path / f"{CELL.stem}.json"

    assert run(tmp_path, "plan,plan 2,PGLE") == 0
    first = read(path)
    assert statuses(first) == {
        "XLA default": "ok", "plan": "ok", "plan 2": "failed", "PGLE": "not on this backend",
    }  # fmt: skip
    assert "no bucket" in first["rows"]["plan 2"]["reason"]
    plan = first["rows"]["plan"]
    assert len(plan["times_ms"]) == 3
    assert plan["numbers"]["max_relative_difference"] < 1e-5
    assert plan["predicted"]["buckets"] == 1
    assert plan["trace"]["communication_ms"] > 0
    assert first["facts"]["chosen"] in ("XLA default", "plan")
    assert first["facts"]["bounds"]["full_overlap_ms"] == 0.5

    assert run(tmp_path, "plan,plan 2,PGLE") == 0
    assert read(path)["rows"] == first["rows"], "nothing was left to do"

    assert run(tmp_path, "plan,no op fusion") == 0
    second = read(path)
    assert statuses(second) == {**statuses(first), "no op fusion": "ok"}
    assert second["rows"]["plan"] == plan


def test_other_searches_run_once_within_the_same_budget_and_are_measured_in_turn(
    kept: CanonicalModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []
    optimized = step._optimized

    def noted(*arguments: Any, **named: Any) -> Any:
        asked.append((arguments[3], named["analytical"]))
        return optimized(*arguments, **named)

    monkeypatch.setattr(step, "_optimized", noted)
    assert run(tmp_path, ",".join(("plan", *step.OTHER_SEARCHES))) == 0
    first = read(tmp_path / f"{CELL.stem}.json")
    assert statuses(first) == dict.fromkeys(("XLA default", "plan", *step.OTHER_SEARCHES), "ok")
    others = first["facts"]["other_searches"]
    for name in step.OTHER_SEARCHES:
        assert others[name]["evaluations"] > 0 < others[name]["search_s"]
        assert others[name]["predicted_ms"] <= first["rows"]["XLA default"]["predicted"]["step_ms"]
        assert first["rows"][name]["numbers"]["max_relative_difference"] < 1e-5
    assert first["facts"]["chosen"] in ("XLA default", "plan"), "the tool would not take another's plan"

    assert run(tmp_path, ",".join(("plan", *step.OTHER_SEARCHES))) == 0
    assert asked == [("backtracking", False), ("joint", True)]


def test_rows_are_compiled_as_the_plugin_compiles_such_plans(
    kept: CanonicalModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "launched_singly", lambda source, strategy, predicted_ns: predicted_ns > 0)
    asked: list[bool] = []
    monkeypatch.setattr(cell, "launch_options", lambda session, singly: asked.append(singly) or {})
    assert run(tmp_path, "plan,no op fusion,random plan 1") == 0
    rows = read(tmp_path / f"{CELL.stem}.json")["rows"]
    assert {name: row.get("launched_singly") for name, row in rows.items()} == {
        "XLA default": None, "plan": True, "no op fusion": None, "random plan 1": True,
    }  # fmt: skip
    assert asked == [True, True]


def test_a_form_is_timed_in_a_row_and_awaited_and_only_small_outputs_are_compared(
    request_and_module: tuple[CompileRequest, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, module = request_and_module
    monkeypatch.setattr(step, "request_of", lambda model, size: request)
    monkeypatch.setattr(measure, "_SMALL_ELEMENTS", 0)
    cell = replace(CELL, model="llama-dp-unroll")
    kept_files(tmp_path, cell, module)
    assert run(tmp_path, "form", models=["llama-dp-unroll"], one_by_one=True) == 0
    record = read(tmp_path / f"{cell.stem}.json")
    orders = [f"random order {number}" for number in (1, 2, 3)]
    assert statuses(record) == {
        **dict.fromkeys(("XLA default", "plan", "plan's order only", *orders), "ok"),
        "XLA's double-buffered loop": "not on this backend",
    }  # fmt: skip
    assert record["rows"]["XLA's double-buffered loop"]["reason"] == "XLA:CPU has none"
    for name in ("XLA default", *orders):
        row = record["rows"][name]
        assert [len(times) for times in (row["times_ms"], row["awaited"]["times_ms"])] == [3, 3]
        assert row["numbers"].keys() == {"max_relative_difference", "loss_relative_difference", "loss"}
        assert row["device_peak"] == {"bytes": None, "unasked_bytes": None}
        assert "trace" not in row
    facts = record["facts"]
    assert facts["predicted_until"] <= facts["measured_from"]


def test_a_cell_of_another_step_is_left_alone(
    kept: CanonicalModule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Record.open(tmp_path, CELL).note(fingerprint="another")
    assert run(tmp_path, "plan") == 1
    assert "is of another step (another, now" in capsys.readouterr().err


def test_a_row_that_the_time_does_not_allow_is_not_begun(
    kept: CanonicalModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "CELL_S", 1e9)
    assert run(tmp_path, "plan") == 3
    record = read(tmp_path / f"{CELL.stem}.json")
    assert statuses(record) == {"XLA default": "ok", "plan": "no time"}
    assert record["rows"]["plan"]["reason"].startswith("0 s are left, compiling takes")


def test_time_for_some_rows_is_not_kept_for_others_that_are_not_compiled(tmp_path: Path) -> None:
    # Once with 291 s for four cells the time to measure all rows was set aside before the first was compiled: none was.
    one: Any = object.__new__(cell.Cell)
    one.record, one.default, one.default_s = Record.open(tmp_path, CELL), None, 8.0
    one.record.update(DEFAULT, predicted={"step_ms": 140.0})
    one.args, one.name, one.compiled, one._compiling = Namespace(rounds=6), CELL, [], set()
    one.context, one.choose_rows = Namespace(backend=Namespace(queues=False)), lambda: None
    one._compile = one.compiled.append
    stages = running._Stages(Namespace(one_by_one=False), lambda: 60.0)
    one.left = [Namespace(name=f"row {number}", kind="") for number in range(40)]
    stages._compile([one])
    assert 5 < len(one.compiled) < 20
    assert one.measuring_s() < 60.0


class LoggedRounds:
    """Rounds of a cell, as the log of what was done."""

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name, self.log, self.fails = name, log, fails

    def __getattr__(self, stage: str) -> Any:
        def do() -> None:
            if stage == self.fails:
                raise RuntimeError(f"{stage} of {self.name}")
            self.log.append(f"{stage} {self.name}")

        return do

    def traces(self) -> Iterator[None]:
        for number in range(2):
            self.log.append(f"trace {number} of {self.name}")
            yield


def test_all_cells_have_as_many_rounds_and_then_traces_while_there_is_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[str] = []

    def measured(left_s: float, fails: str = "") -> list[str]:
        del log[:]
        cells = [
            Namespace(
                name=CELL, record=Record.open(tmp_path, CELL),
                rounds=lambda name=name: LoggedRounds(name, log, fails if name == "a" else ""),
            )
            for name in "ab"
        ]  # fmt: skip
        stages: Any = running._Stages(Namespace(rounds=3, one_by_one=False), lambda: left_s)
        stages._measure(cells)
        return log

    stages_run = ("begin", "run_one", "run_one", "choose")
    rounds = [f"{stage} {name}" for stage in stages_run for name in "ab"]
    traces = [f"trace {number} of {name}" for number in range(2) for name in "ab"]
    assert measured(1000.0) == [*rounds, *traces]
    assert measured(1.0) == [*rounds[:4], *rounds[-2:]]
    assert measured(1.0, fails="begin") == ["begin b", "run_one b", "choose b"]
    assert "RuntimeError: begin of a" in capsys.readouterr().err


def test_a_link_that_is_slower_in_the_rounds_is_predicted_so(
    request_and_module: tuple[CompileRequest, bytes], tmp_path: Path
) -> None:
    _, module = request_and_module
    kept_files(tmp_path, CELL, module)
    files, record = step.Files(tmp_path, CELL), Record.open(tmp_path, CELL)
    gpu = replace(profile(), platform=Platform("Nobody's GPU", "gpu", "", "0", "0"))
    captured = Step(module, canonicalize(module))
    graph, xla = captured.source.graph, read_strategy(captured.source)
    ran = {"status": "ok", "spread_ms": 1.0, "times_ms": [38.0] * 3, "median_ms": 38.0, "of_default": 0.8}
    record.update(DEFAULT, **ran | {"median_ms": 50.0, "of_default": 1.0})  # the row's ratio says 40 ms
    plan = Ran(captured.source, one_at_a_time(graph, one_bucket(graph, xla.groups)))
    rows = {"plan": plan, ALONE_XLA: Ran(captured.source, one_at_a_time(graph, xla))}
    plans = files.plans()
    assert plans is not None
    promised = predicted(step.costs(gpu, captured, plans), plan)
    record.update("plan", **ran)
    predict_in_rounds(record, captured, gpu, plans, rows)
    assert "predicted_in_rounds" not in record.row("plan")

    record.update(ALONE_XLA, **ran)
    predict_in_rounds(record, captured, gpu, plans, rows)
    assert record.row(ALONE_XLA)["predicted_in_rounds"]["step_ms"] == pytest.approx(40.0, rel=0.01)
    slower = record.row("plan")["predicted_in_rounds"]
    assert slower["compute_ms"] == promised["compute_ms"]
    assert slower["communication_ms"] > 10 * promised["communication_ms"]
    assert 1.0 < record.fact("bounds_in_rounds")["bound_ms"] <= slower["step_ms"]


def test_in_the_rounds_every_kind_of_collectives_is_slower_by_the_same_factor() -> None:
    """All-gathers kept the rate of the profile, and were counted as all-reduces of as many bytes."""
    graph = canonicalize(module_of(SHARDED)).graph
    lines = {
        "all-gather {0,1},{2,3}": LinearPieces.of((0, 10.0, 500.0)),
        str(ALL_REDUCE): LinearPieces.of((0, 0.0, 20.0)),
    }
    fits = {kind: CollectiveFit(line, (), 0.0, 0.0) for kind, line in lines.items()}
    gpu = replace(
        profile(),
        platform=Platform("Nobody's GPU", "gpu", "", "0", "0"),
        all_reduce=fits.pop(str(ALL_REDUCE)),
        collectives={kind: Collectives(one) for kind, one in fits.items()},
    )
    buckets = unfused(graph).buckets
    known_ns = each_ns(gpu, graph, buckets)
    assert sorted(known_ns) == [20, 20, 20, 20, 1140]
    again = with_took(Costs(gpu, MadeUpCosts()), graph, buckets, InStep(((0, 1),), 2 * sum(known_ns), 3, 5))
    assert again is not None
    assert each_ns(again, graph, buckets) == [2 * ns for ns in known_ns]


def each_ns(known: Profile, graph: Graph, buckets: Sequence[Bucket]) -> list[int]:
    costs = Costs(known, MadeUpCosts())
    nodes = [node for bucket in buckets for node in bucket.collectives]
    return [int(costs.collective(collective_kind(graph.nodes[x]))(collective_bytes(graph, x))) for x in nodes]


@pytest.mark.slow  # compiles the search's code where nothing has yet
def test_a_search_needs_no_device(request_and_module: tuple[CompileRequest, bytes], tmp_path: Path) -> None:
    _, module = request_and_module
    found = step.search(Step(module, canonicalize(module)), profile(), _settings(tmp_path))
    files = step.Files(tmp_path, CELL)
    files.save_plans(found)
    assert files.plans() == found
    assert [name for name, _, _ in found.strategies][-1].startswith("plan")


@pytest.mark.slow  # compiles the search's code where nothing has yet
def test_what_compiling_the_predictions_takes_is_not_of_the_budget(
    request_and_module: tuple[CompileRequest, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiling(Case):
        @functools.cached_property
        def unfused(self) -> Scheduled:
            time.sleep(2 * _settings(tmp_path).budget_s)
            return super().unfused

    monkeypatch.setattr(step, "Case", Compiling)
    module = request_and_module[1]
    assert step.search(Step(module, canonicalize(module)), profile(), _settings(tmp_path)).evaluations > 0


def _settings(folder: Path) -> Any:
    from disco_hlo.plugin.settings import Settings

    return Settings(search=True, directory=folder, budget_s=0.5, finalists=2)


# --- strategies -----------------------------------------------------------------------------------


def test_thresholds_combine_neighbours_as_long_as_they_fit(
    request_and_module: tuple[CompileRequest, bytes],
) -> None:
    graph = canonicalize(request_and_module[1]).graph
    separate = unfused(graph)
    assert combined_up_to(graph, separate, 0) == separate.buckets
    together = combined_up_to(graph, separate, 1 << 40)
    assert sorted(node for bucket in together for node in bucket.collectives) == sorted(graph.collectives)
    assert len(together) == len(one_bucket(graph).buckets)


def test_buckets_by_hand_hold_a_block_of_the_model() -> None:
    source = captured("h100_llama/fsdp_scan")
    strategy = bucketed_per_block(source, read_strategy(source))
    verify(source, apply(strategy, source), strategy)
    graph = source.computations["loop1"].graph
    gathered = [
        len(bucket.collectives)
        for bucket in dict(strategy.regions)["loop1"].buckets
        if graph.nodes[bucket.collectives[0]].opcode == "all-gather"
    ]
    assert max(gathered) == 7


@pytest.mark.parametrize(
    ("shapes", "cuts"),
    [
        ("", [0]),
        ("abc", [0, 3]),
        ("abab", [0, 2, 4]),
        ("xabcabcaby", [0, 1, 4, 7, 10]),
        ("aaa", [0, 1, 2, 3]),
    ],
)
def test_blocks_are_cut_where_shapes_repeat(shapes: str, cuts: list[int]) -> None:
    assert block_cuts(shapes) == cuts


def test_the_threshold_to_guide_is_the_fastest_one_measured(tmp_path: Path) -> None:
    record = Record.open(tmp_path, CELL)
    assert best_threshold_bytes(record) is None
    record.update("threshold 16 MiB", of_default=0.97)
    record.update("threshold 4 MiB", status="failed")
    record.update("threshold everything", of_default=0.98)
    record.update("plan", of_default=0.8)
    assert best_threshold_bytes(record) == 16 << 20


def test_random_plans_are_legal_and_repeatable(request_and_module: tuple[CompileRequest, bytes]) -> None:
    module = request_and_module[1]
    source = canonicalize(module)
    costs = step.costs(profile(), Step(module, source))
    bases = (read_strategy(source),)

    def made() -> list[Strategy]:
        return [random_strategy(source, seed, bases, costs, costs.machine) for seed in range(6)]

    strategies = made()
    assert strategies == made()
    assert len(set(strategies)) > 1
    for strategy in strategies:
        units = unit_graph(source.graph, strategy)
        check_order(units, strategy.order, asynchronous=False)
        check_strategy(source.graph, strategy, units, ())


def test_what_xla_made_of_a_row_is_kept(tmp_path: Path) -> None:
    files = step.Files(tmp_path, CellName("gpt12", "tiny", "staged", 2))
    files.save_row("XLA's double-buffered loop", b"a module")
    kept = tmp_path / "gpt12-tiny-staged-2" / "xla-s-double-buffered-loop.module.hlo.pb.gz"
    assert gzip.decompress(kept.read_bytes()) == b"a module"
