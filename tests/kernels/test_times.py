"""What kernels take: as measured, by a line in between, at least their limit; and where that is less than a pair."""

import dataclasses
from pathlib import Path

import pytest

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.kernels import times
from disco_hlo.kernels.pattern import fused_calls
from disco_hlo.kernels.times import LAUNCH_NS, Limits, Size, fused_ns, is_faster, size_named
from disco_hlo.optimize.costs import Costs, costs_of
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from disco_hlo.plugin.measuring.known_times import KnownTimes
from disco_hlo.profiler.keys import kernel_keys
from disco_hlo.profiler.profile import Link, OpTime
from disco_hlo.profiler.store import ProfileStore
from tests.kernels.test_pattern import ADD, ROWS_BY, SUM
from tests.modules import module_of
from tests.plugin.test_structure import profile

GATHER = Size("all-gather-matmul", 2, "bf16", 4096, 4096, 4096)
REDUCE = dataclasses.replace(GATHER, kernel="matmul-all-reduce")
# 1 ns for 1000 flops, and for 100 bytes of any collective, which takes 9 us to begin.
LIMITS = Limits({}, 1000.0, 1e9, lambda _, moved: 9000 + moved / 100)


def test_a_name_tells_its_size_whatever_number_stands_behind() -> None:
    assert size_named(GATHER.key) == size_named(GATHER.key + ".3.1") == GATHER
    assert [size_named(name) for name in ("dot.1", "kernel.unknown.2.bf16.1.2.3", GATHER.key + "x")] == [
        None
    ] * 3


def test_work_is_counted_as_the_kernel_has_it() -> None:
    assert (GATHER.rows, REDUCE.rows) == (8192, 4096)
    assert (GATHER.flops, REDUCE.flops) == (2 * 8192 * 4096**2, 2 * 4096**3)
    assert (GATHER.collective_bytes, REDUCE.collective_bytes) == (2 * 8192 * 4096, 2 * 4096 * 4096)


@pytest.mark.parametrize(
    ("scales", "at"), [((), 1.0), ((1.0,), 2.0), ((0.5, 2.0), 1.0), ((0.5, 1.0, 2.0), 4.0)]
)
def test_a_line_foretells_sizes_in_between(scales: tuple[float, ...], at: float) -> None:
    def of(scale: float) -> Size:
        return dataclasses.replace(GATHER, m=round(4096 * scale))

    offset, slope = (0.0, 1.3) if len(scales) == 1 else (LAUNCH_NS, 1.0) if not scales else (9000.0, 1.2)
    measured = {of(scale): offset + slope * LIMITS.limit_ns(of(scale)) for scale in scales}
    measured[dataclasses.replace(GATHER, devices=4)] = 1.0
    assert fused_ns(of(at), measured, LIMITS) == pytest.approx(offset + slope * LIMITS.limit_ns(of(at)))


def test_no_line_goes_below_what_limits_a_kernel() -> None:
    small = dataclasses.replace(GATHER, m=64)
    measured = {small: 10.0, GATHER: 20.0}
    other = dataclasses.replace(GATHER, m=2048)
    assert fused_ns(other, measured, LIMITS) == LIMITS.limit_ns(other)
    assert fused_ns(small, measured, LIMITS) == 10.0


def test_a_pair_is_worth_a_kernel_that_takes_less() -> None:
    both = LIMITS.separate_ns(REDUCE)
    assert both == LIMITS.compute_ns(REDUCE) + LIMITS.collective_ns(REDUCE)
    assert is_faster(REDUCE, both, {REDUCE: both - 1}, LIMITS)
    assert not is_faster(REDUCE, both, {REDUCE: both + 1}, LIMITS)


def test_what_a_collective_takes_to_begin_limits_no_kernel() -> None:
    small = dataclasses.replace(GATHER, kernel="matvec-all-reduce", m=64, n=1)
    assert LIMITS.limit_ns(small) == LIMITS.compute_ns(small) < LIMITS.collective_ns(small)
    wide = dataclasses.replace(GATHER, n=1)
    assert LIMITS.limit_ns(wide) == pytest.approx(LIMITS.collective_ns(wide) - 9000)


def test_an_update_moves_its_arrays_and_gathers_as_well() -> None:
    update = Size("scattered-update", 2, "f32", 1 << 20, 5, 1)
    assert (update.flops, update.collective_bytes, update.memory_bytes) == (0, 4 << 20, 14 << 20)
    assert LIMITS.separate_ns(update) == LIMITS.compute_ns(update) + 2 * LIMITS.collective_ns(update)
    assert size_named(update.key) == update


def step(name: str) -> CanonicalModule:
    return canonicalize(
        module_of(f"""ENTRY e {{
      a = bf16[4096,4096] parameter(0)
      b = bf16[4096,4096] parameter(1)
      {name} = bf16[8192,4096] custom-call(a, b), custom_call_target="mosaic_gpu_v2"
      ROOT r = bf16[8192,4096] negate({name}) }}""")
    )


@pytest.mark.parametrize(("other", "result", "flops"), [
    ("bf16[512]", "(f32[4,1024], bf16[1024])", 2 * 1024 * 512),
    ("bf16[1024]", "(f32[4,1024], bf16[1024])", 0),
    ("bf16[512,256]", "(bf16[2,1024,256], bf16[2048,256])", 2 * 2048 * 512 * 256),
    ("bf16[1024,512]", "(bf16[1024,512], f32[])", 0),
])  # fmt: skip
def test_a_kernels_operations_are_those_of_its_product(other: str, result: str, flops: int) -> None:
    module = canonicalize(
        module_of(f"""ENTRY e {{
      a = bf16[1024,512] parameter(0)
      b = {other} parameter(1)
      ROOT k = {result} custom-call(a, b), custom_call_target="mosaic_gpu_v2" }}""")
    )
    assert [node.flops for node in module.graph.nodes if node.opcode == "custom-call"] == [flops]


def costs(source: CanonicalModule, ops: dict[str, OpTime]) -> Costs:
    return costs_of(dataclasses.replace(profile("gpu", 0.01), ops=ops), source)


def test_what_one_step_measured_another_is_foretold(tmp_path: Path) -> None:
    first, plain = step(GATHER.key), step("other")
    (kernel,) = [node for node in first.graph.nodes if node.opcode == "custom-call"]
    unknown = costs(plain, {})
    assert set(times.foretold(unknown, first, plain)) == {kernel.key}
    assert times.foretold(unknown, plain, plain) == {}

    taken = costs(first, {kernel.key: OpTime(400_000, 0, 5)}).profile
    with ProfileStore(tmp_path / "store.sqlite") as store:
        times.keep(store, taken, first)
        kept = store.ops(taken.platform)
        assert kept == {GATHER.key: OpTime(400_000, 0, 5)}
        again = dataclasses.replace(taken, ops={**kept, kernel.key: OpTime(500_000, 0, 5)})
        times.keep(store, again, first)
        assert store.ops(taken.platform) == kept, "each size is measured once"
    known = costs(plain, kept)
    assert times.foretold(known, first, plain)[kernel.key].median_ns == 400_000


def test_a_kernel_outside_of_loops_must_gain_what_it_takes_to_prepare() -> None:
    module = module_of(f"""{ADD}\nENTRY e {{
      x = bf16[512,512] parameter(0)
      d = bf16[512,512] dot(x, x), {ROWS_BY}
      ROOT r = bf16[512,512] all-reduce(d), {SUM} }}""")
    (call,) = fused_calls(module)
    plain = step("other")
    limits = times.limits_of(costs(plain, {}), plain)
    separate_ns = round(limits.separate_ns(call.size))
    for less_ns, expected in (
        (1, (True, False)),
        (round(times.PREPARED_NS) + 1, (True, True)),
        (-1, (False, False)),
    ):
        known = {call.size.key: OpTime(max(1, separate_ns - less_ns), 0, 1)}
        pays = times.payer(costs(plain, known), plain)
        assert (pays(call, "all-reduce", True), pays(call, "all-reduce", False)) == expected
        never = dataclasses.replace(call, kernel="matmul-all-to-all")
        assert not pays(never, "all-to-all", True), "no GPU has run it inside a step"


def test_a_structure_is_traced_until_its_kernels_have_times() -> None:
    source, plain = step(GATHER.key), step("other")
    known = KnownTimes(costs(plain, {}).profile.platform, Link(2, 1), None)
    xla = read(source)
    (kernel,) = times.kernel_sizes(source)
    fused = unit_graph(source.graph, xla).kernels(source.graph)
    known.add_ops("", dict.fromkeys(kernel_keys(source.graph, fused), OpTime(1, 0, 1)), [])
    assert known.lacks(source, xla, like=plain)["ops"] is True
    known.add_ops("", {kernel: OpTime(400_000, 0, 5)}, [])
    assert known.lacks(source, xla, like=plain)["ops"] is False
