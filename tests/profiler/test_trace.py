"""Reading traces: XLA's event formats, real and written by hand; what real traces of two H100s tell."""

from __future__ import annotations

import gzip
import json
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import profiler
from jax.profiler import ProfileData
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.proto import parse
from disco_hlo.plugin.xla.jaxlink import OwnTrace
from disco_hlo.profiler.command_buffers import with_names
from disco_hlo.profiler.contention import contention
from disco_hlo.profiler.instructions import instruction_times
from disco_hlo.profiler.keys import owners
from disco_hlo.profiler.trace import (
    RUN_MARK,
    Execution,
    RunWindow,
    Trace,
    collect,
    is_transfer,
    joined,
    options,
    read,
    unit_of_name,
)

DATA = Path(__file__).parent / "data"


def test_traces_are_joined_as_one_with_the_runs_of_all():
    def one(run, start, end):
        return Execution("dot", "jit_step", run, 0, start, end)

    first = Trace((one(0, 5, 9), one(1, 12, 15)), (RunWindow(4, 10), RunWindow(11, 16)))
    second = Trace((one(0, 7, 8),), (RunWindow(6, 9),))
    assert joined([first, second]) == Trace(
        (one(0, 1, 5), one(1, 8, 11), one(2, 14, 15)), (RunWindow(0, 6), RunWindow(7, 12), RunWindow(13, 16))
    )
    assert joined([second]).executions[0].run == 0


def xspace(planes):
    """A serialized XSpace from {plane: {line: [(event, start_ns, duration_ns, stats)]}}."""
    names = {}

    def number(name):
        return names.setdefault(name, len(names) + 1)

    text = ""
    for plane, lines in planes.items():
        body = ""
        for line, events in lines.items():
            rows = ""
            for event, start, duration, stats in events:
                values = " ".join(
                    f"stats {{ metadata_id: {number(key)} "
                    + (f'str_value: "{value}"' if isinstance(value, str) else f"int64_value: {value}")
                    + " }"
                    for key, value in stats.items()
                )
                times = f"offset_ps: {start * 1000} duration_ps: {duration * 1000}"
                rows += f"events {{ metadata_id: {number(event)} {times} {values} }} "
            body += f'lines {{ name: "{line}" {rows} }} '
        for name, value in names.items():
            for table in ("event_metadata", "stat_metadata"):
                body += f'{table} {{ key: {value} value {{ id: {value} name: "{name}" }} }} '
        text += f'planes {{ name: "{plane}" {body} }} '
    return ProfileData.text_proto_to_serialized_xspace(text)


def thunk(op, run, device, flow):
    return {
        "hlo_op": op,
        "hlo_module": "jit_step",
        "run_id": run,
        "device_ordinal": device,
        "_pt": 0,
        "_p": flow,
    }


def test_cpu_thunks_end_where_their_completion_event_says():
    data = xspace({
        "/host:CPU": {
            "main": [(RUN_MARK, 0, 1000, {})],
            "worker 1": [
                ("dot.1", 100, 50, thunk("dot.1", 7, 0, 11)),
                ("end: add.2", 260, 1, {"_ct": 0, "_c": 12}),
            ],
            "worker 2": [
                ("end: dot.1", 400, 1, {"_ct": 0, "_c": 11}),
                ("add.2", 200, 70, thunk("add.2", 7, 1, 12)),
            ],
        }
    })  # fmt: skip
    trace = read(data)
    assert trace.windows == (RunWindow(0, 1000),)
    assert trace.executions == (
        Execution("dot.1", "jit_step", 0, 0, 100, 400),
        Execution("add.2", "jit_step", 0, 1, 200, 270),
    )


def test_a_thunk_without_completion_event_ends_with_its_launch():
    data = xspace({"/host:CPU": {"worker": [("add.2", 200, 70, thunk("add.2", 7, 0, 12))]}})
    assert [execution.end_ns for execution in read(data).executions] == [270]


def test_runs_are_numbered_in_time_order_not_by_run_id():
    data = xspace({
        "/host:CPU": {
            "worker": [("a", 500, 10, thunk("a", 3, 0, 1)), ("a", 100, 10, thunk("a", 9, 0, 2))],
        }
    })  # fmt: skip
    assert [(execution.start_ns, execution.run) for execution in read(data).executions] == [
        (100, 0),
        (500, 1),
    ]


def test_gpu_kernels_belong_to_the_run_whose_mark_began_last():
    kernel = {"hlo_op": "fusion.1", "hlo_module": "jit_step"}
    data = xspace({
        "/device:GPU:1": {
            "Stream #2": [
                ("loop_fusion", 120, 30, kernel),
                ("loop_fusion", 620, 40, kernel),
                ("Memset", 700, 5, {}),
            ]
        },
        "/host:CPU": {"main": [(RUN_MARK, 100, 200, {}), (RUN_MARK, 600, 200, {})]},
    })  # fmt: skip
    trace = read(data)
    assert trace.executions == (
        Execution("fusion.1", "jit_step", 0, 1, 120, 150, "loop_fusion"),
        Execution("fusion.1", "jit_step", 1, 1, 620, 660, "loop_fusion"),
    )


def test_beside_kernels_the_host_has_marks_and_no_executions():
    called = {"hlo_op": "fusion.1", "hlo_module": "jit_step", "device_ordinal": "unread"}
    data = xspace({
        "/host:CPU": {"main": [(RUN_MARK, 100, 200, {}), ("cuLaunchKernel", 110, 5, called)]},
        "/device:GPU:0": {"Stream #2": [("k", 120, 30, {"hlo_op": "fusion.1", "hlo_module": "jit_step"})]},
    })  # fmt: skip
    assert read(data) == Trace(
        (Execution("fusion.1", "jit_step", 0, 0, 120, 150, "k"),), (RunWindow(100, 300),)
    )


def test_a_gpu_trace_without_run_marks_is_refused_with_the_way_out():
    data = xspace({"/device:GPU:0": {"s": [("k", 1, 2, {"hlo_op": "a", "hlo_module": "m"})]}})
    with pytest.raises(ProfileError, match=r"which run.*collect"):
        read(data)


@pytest.mark.parametrize(
    ("plane", "stats"),
    [("/device:GPU:first", {}), ("/host:CPU", {"device_ordinal": "first"}), ("/host:CPU", {"_p": "none"})],
)
def test_a_trace_with_text_for_numbers_is_refused(plane, stats):
    data = xspace(
        {plane: {"line": [("dot.1", 5, 1, {"hlo_op": "dot.1", "hlo_module": "jit_step", **stats})]}}
    )
    with pytest.raises(ProfileError, match="not a profiler trace"):
        read(data)


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff\xffnot a trace", b"", xspace({"/host:CPU": {"main": []}})]
)
def test_what_is_no_trace_is_refused(data):
    with pytest.raises(ProfileError):
        read(data)


@pytest.mark.parametrize(("repeats", "warmup"), [(0, 1), (1, -1)])
def test_collect_refuses_impossible_counts(repeats, warmup):
    with pytest.raises(ProfileError, match="at least 1 profiled run"):
        collect(OwnTrace(), lambda: None, repeats, warmup)


@pytest.mark.parametrize(
    ("name", "runs", "executions"),
    [("cpu_jax_0_10_2", 3, 624), ("cpu_jax_0_12_0", 3, 624), ("h200_jax_0_11_2", 4, 624)],
)
def test_traces_of_every_supported_xla_are_read(name, runs, executions):
    trace = read(gzip.decompress((DATA / f"{name}.xspace.gz").read_bytes()))
    assert len(trace.windows) == runs
    assert {execution.run for execution in trace.executions} == set(range(runs))
    assert {execution.device for execution in trace.executions} == {0, 1}
    assert len(trace.executions) == executions
    assert all(execution.start_ns < execution.end_ns for execution in trace.executions)


def test_a_real_run_gives_every_entry_instruction_a_time(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    def step(w, x):
        def loss(w):
            h, _ = jax.lax.scan(
                lambda h, _: (jnp.sin(h @ w["b"]), None), jnp.tanh(x @ w["a"]), None, length=3
            )
            return jnp.mean(jax.nn.softmax(h) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("d",)))
    w = {name: jax.device_put(np.ones((64, 64), "f"), whole) for name in "ab"}
    x = jax.device_put(np.ones((128, 64), "f"), rows)
    compiled = jax.jit(step).lower(w, x).compile()
    calls = []

    def run_once():
        calls.append(0)
        jax.block_until_ready(compiled(w, x))

    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    trace, inside = read(collect(OwnTrace(), run_once, repeats=4, warmup=2)), owners(module)
    times = instruction_times(trace, "jit_step", inside)
    index = ModuleIndex(parse(module))
    entry = {i.name: i.opcode for i in index.computation(index.module.entry_computation_id).instructions}
    free = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
    computing = {name for name, opcode in entry.items() if opcode not in free}
    assert {name: time.samples for name, time in times.items()} == dict.fromkeys(computing, 4 * 2)
    assert {"while", "all-reduce", "fusion"} <= {entry[name] for name in computing}
    assert all(time.median_ns > 0 for time in times.values())
    jax.profiler.start_trace(str(tmp_path))
    with pytest.raises(ProfileError, match="the script's own profiler trace is under way"):
        collect(OwnTrace(), run_once, repeats=1)
    jax.profiler.stop_trace()
    assert len(calls) == 2 + 4 + 1


def test_a_trace_that_the_script_ended_by_one_of_its_own_is_none(tmp_path):
    with pytest.raises(ProfileError, match="the script began a profiler trace of its own"):
        collect(OwnTrace(), lambda: jax.profiler.start_trace(str(tmp_path)), 1, warmup=0)
    jax.profiler.stop_trace()
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_script_that_begins_a_trace_waits_until_ours_has_stopped():
    """XLA has one profiler: a trace that began while ours was being read out failed where the script ended it."""
    trace, order = OwnTrace(), []
    trace.start(options())
    session, script = trace._session, threading.Thread(target=lambda: (begun(), order.append("begun")))

    def begun():
        with profiler._profile_state.lock:
            pass

    def stop():
        script.start()
        script.join(0.2)
        order.append("stopped")
        return session.stop()

    trace._session = SimpleNamespace(stop=stop)
    assert trace.stop()
    script.join()
    assert order == ["stopped", "begun"]


TRACES = Path(__file__).parents[1] / "data" / "h100_traces"
PRODUCTS = ("custom-call", "convolution", "dot")


def kept(name: str, module: str) -> Trace:
    """A kept trace: rows of instruction, kernel, run, device, start and duration in ns."""
    rows = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    executions = [
        Execution(op, module, run, device, start, start + ns, kernel)
        for op, kernel, run, device, start, ns in rows
    ]
    executions.sort(key=lambda one: one.start_ns)
    return Trace(tuple(executions), (RunWindow(0, 1),) * len({one.run for one in executions}))


def named(step: str) -> Trace:
    found = with_names(kept(f"{step}-buffered", "jit_a"), "jit_a", kept(f"{step}-named", "jit_b"), "jit_b")
    assert found.unnamed_ns == 0
    return found.trace


@pytest.mark.parametrize(
    ("step", "events"), [("vgg19-alone", 1168), ("vgg19-beside", 1168), ("rnnlm-alone", 1228)]
)
def test_every_kernel_in_a_command_buffer_finds_its_name(step: str, events: int) -> None:
    """Copies are kernels in a command buffer and have streams of their own outside, in the loops of rnnlm."""
    found = named(step)
    assert len(found.executions) == events
    assert not any(one.op.startswith("command_buffer") for one in found.executions)
    outside = kept(f"{step}-named", "jit_b")
    runs = len({one.run for one in found.executions})
    names, expected = (Counter(one.op for one in trace.executions) for trace in (found, outside))
    assert names == {op: runs * count for op, count in expected.items()}


def test_kernels_take_less_in_command_buffers() -> None:
    inside, outside = (
        sum(
            time.median_ns
            for op, time in instruction_times(joined([trace] * 3), "jit_b", {}).items()
            if not op.startswith("b")
        )
        for trace in (named("rnnlm-alone"), kept("rnnlm-alone-named", "jit_b"))
    )
    assert (inside, outside) == (18_998_119, 20_272_152)


def test_what_vgg19_s_kernels_and_transfers_cost_each_other() -> None:
    alone, beside = named("vgg19-alone"), named("vgg19-beside")
    products = {unit_of_name(one.op) for one in alone.executions if any(word in one.op for word in PRODUCTS)}
    assert sum(is_transfer(one) for one in alone.executions) == 108
    found = contention(alone, beside, "jit_b", products=products)
    assert found is not None
    assert (found.compute, found.communication) == pytest.approx((1.806, 2.029), abs=5e-4)
    assert found.products == 2.0, "twice its time at most; as read 3.3"
    assert found.others == pytest.approx(1.125, abs=5e-4)
