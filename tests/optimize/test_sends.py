"""Pipeline sends in shards on a machine that is imagined: which may be, and what they then take."""

from __future__ import annotations

import pytest

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.proto import DetailedModule
from disco_hlo.optimize.costs import Costs, costs_of
from disco_hlo.optimize.gains import gains, producers
from disco_hlo.optimize.regions import step_times
from disco_hlo.optimize.sends import in_shards, sends_ns, sent_by_groups
from disco_hlo.plan.read import read
from disco_hlo.whatif.coconet import in_tiles_ns
from disco_hlo.whatif.machine import collective_ns, load, send
from tests.modules import ADD, module_of
from tests.report import plans
from tests.simulator.problems import problem

BYTES = 32_000_000
TO_NEXT_NODE = "{0,8}, {1,9}, {2,10}, {3,11}, {4,12}, {5,13}, {6,14}, {7,15}"
REDUCED = "channel_id=1, replica_groups=[2,8]<=[16], use_global_device_ids=true, to_apply=add"
OF_A_GPU = 'backend_config={"operation_queue_id":"0"}'
FOUR_TURNS = 'backend_config={"known_trip_count":{"n":"4"}}'
H200 = load("h200")
SLICED_NS = send(H200, between_nodes=True).ns(BYTES / 8) + collective_ns(H200, "all-gather", BYTES, 8)


def pipeline(
    body_sends: str = "y", pairs: str = TO_NEXT_NODE, entry_sends: str = "first", size: int = 8_000_000
) -> CanonicalModule:
    """A loop that all-reduces within nodes of 8 and sends ``body_sends`` (an array of ``size``), four times; then the
    entry sends ``entry_sends``, where ``first`` is a parameter."""
    array = f"f32[{size}]"
    return canonicalize(module_of(f"""HloModule stages, is_scheduled=true
{ADD}
condition {{ p = (s32[], {array}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(4)
  ROOT c = pred[] compare(i, n), direction=LT }}
body {{ p = (s32[], {array}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = {array} get-tuple-element(p), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  y = {array} all-reduce(x), {REDUCED}
  z = {array} add(y, x), {OF_A_GPU}
  b = ({array}, {array}) collective-permute-start({body_sends}), channel_id=2, source_target_pairs={{{pairs}}}
  d = {array} collective-permute-done(b)
  w = {array} multiply(d, z)
  ROOT t = (s32[], {array}) tuple(j, w) }}
ENTRY main {{ first = {array} parameter(0)
  o = s32[] constant(0)
  t = (s32[], {array}) tuple(o, first)
  w = (s32[], {array}) while(t), condition=condition, body=body, {FOUR_TURNS}
  last = {array} get-tuple-element(w), index=1
  y = {array} all-reduce(last), {REDUCED}
  s = {array} collective-permute({entry_sends}), channel_id=3, source_target_pairs={{{TO_NEXT_NODE}}}
  ROOT r = {array} add(s, y) }}
"""))  # fmt: skip


def on_h200(step: CanonicalModule) -> Costs:
    return costs_of(plans.sockets_profile(), step).on(H200, 16)


def sent_ns(graph: Graph, costs: Costs) -> int:
    (sent,) = sends_ns(graph, costs).values()
    return sent


def replicated(step: CanonicalModule) -> CanonicalModule:
    """The step whose argument all devices hold."""
    module = DetailedModule.FromString(step.module.SerializeToString())
    module.spmd_parameters_shardings.add().type = 0
    return canonicalize(module.SerializeToString())


def test_what_a_node_holds_alike_is_sent_in_shards_and_gathered() -> None:
    step = pipeline()
    body, costs, sends = step.computations["loop1"].graph, on_h200(step), sent_by_groups(step)["loop1"]
    assert sent_ns(body, costs) == pytest.approx(send(H200, between_nodes=True).ns(BYTES), abs=2)
    sharded, told = in_shards(body, costs, sends, overlapped=False)
    assert told == "1 of 1 sends in shards"
    assert sent_ns(body, sharded) == pytest.approx(SLICED_NS, abs=2)
    by_tiles, _ = in_shards(body, costs, sends, overlapped=True)
    gathered_ns = collective_ns(H200, "all-gather", BYTES, 8)
    assert sent_ns(body, by_tiles) == pytest.approx(
        in_tiles_ns(BYTES, SLICED_NS - gathered_ns, gathered_ns), abs=2
    )


@pytest.mark.parametrize(
    "step",
    [
        pipeline("z"),  # with the loop's state, which begins as something that differs
        pipeline(pairs=TO_NEXT_NODE.replace("{0,8}, {1,9}", "{0,9}, {1,8}")),
        pipeline(pairs="{0,8}"),
        pipeline(size=7_999_999),
    ],
    ids=["differs", "out of order", "one device", "no shards"],
)
def test_other_sends_stay_whole(step: CanonicalModule) -> None:
    assert sent_by_groups(step)["loop1"] == {}
    body, costs = step.computations["loop1"].graph, on_h200(step)
    sharded, told = in_shards(body, costs, {}, overlapped=False)
    assert told == "0 of 1 sends in shards"
    assert sent_ns(body, sharded) == sent_ns(body, costs)


def test_an_asynchronous_send_within_a_node_takes_no_port() -> None:
    step = pipeline(pairs="{0,1}, {1,0}")
    body = step.computations["loop1"].graph
    assert sent_ns(body, on_h200(step)) == pytest.approx(send(H200, between_nodes=False).ns(BYTES), abs=2)


def test_what_a_loop_carries_counts_as_alike_where_it_begins_and_stays_so() -> None:
    step = pipeline("z")
    assert sent_by_groups(step) == {"entry": {}, "loop1": {}}
    both = sent_by_groups(replicated(step))
    assert [len(of) for of in (both["entry"], both["loop1"])] == [1, 1]


def test_a_step_with_sends_says_what_slicing_them_gives() -> None:
    step = pipeline(entry_sends="y")
    times = step_times(step, read(step), on_h200(step))
    found = gains(step, times, 16)
    saved_ns = times.predicted["loop1"].timeline.makespan_ns - found["loop1"]["sliced sends"].step_ns
    whole_ns = send(H200, between_nodes=True).ns(BYTES)
    assert saved_ns == pytest.approx(whole_ns - SLICED_NS, rel=1e-3)
    entry = found["entry"]
    assert times.makespan_ns - entry["sliced sends"].step_ns == pytest.approx(5 * saved_ns, rel=1e-3)
    assert entry["fused kernels"].step_ns < entry["sliced sends"].step_ns
    assert entry["fused kernels"].told.endswith("; 1 of 1 sends in shards")
    assert "sends" not in entry["T3"].told


def test_a_step_without_sends_has_no_such_row() -> None:
    step = plans.h200()
    assert "sliced sends" not in gains(step, step_times(step, read(step), on_h200(step)), 16)["entry"]


def test_a_collective_follows_a_matmul_unless_it_waits_longer_for_another_collective() -> None:
    step = """
        y 5 on 1
        p 3
        x 4 on 1 after y p
    """
    assert producers(problem(step, "y ~y p x ~x")) == {2: 1}
    assert producers(problem(step, "y p ~y x ~x")) == {}
