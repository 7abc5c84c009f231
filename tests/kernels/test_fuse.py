"""Pairs become kernels: the same numbers through every layout, one order with collectives, plans, refusals."""

import dataclasses
import re
from graphlib import TopologicalSorter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from disco_hlo.errors import IllegalMoveError, PlanError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.graph import Kind
from disco_hlo.hlo.proto import Message, parse, serialize
from disco_hlo.kernels import fuse
from disco_hlo.kernels.fuse import Shape, kernel_schedules
from disco_hlo.kernels.pattern import Call
from disco_hlo.kernels.refusals import OLDEST_JAX, KernelRefusedError
from disco_hlo.kernels.tiles import MatmulTiles
from disco_hlo.kernels.update_pattern import Recipe
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin import structure
from disco_hlo.plugin.structure import Early, named_schedules
from disco_hlo.structure.moves import Fuse, Move, Split, apply_moves, from_json, to_json
from disco_hlo.structure.program import Program
from tests.kernels.test_pattern import ADD, FOUND, GLOBAL, ROWS_BY, SUM
from tests.modules import module_of
from tests.structure.enact import opcodes, run_early

if jax.__version_info__ < OLDEST_JAX:
    pytest.skip(f"jax {jax.__version__} lacks what the kernels use", allow_module_level=True)

from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu

from disco_hlo.kernels import lowering
from disco_hlo.kernels.lowering import lowered
from tests.kernels.test_lowering import MULTIPROCESSORS, JaxOnHopper


def stand_in(kernel: str, tiles: MatmulTiles, devices: int, shapes: tuple[Shape, ...]) -> bytes:
    """What a kernel computes, by one collective that no region belongs to."""
    (m, k), rest = shapes[0][0], shapes[1][0]
    n = f",{rest[1]}" if len(rest) == 2 else ""
    whole = f"bf16[{m}{n}]"
    operands = f"""
      a = bf16[{m},{k}] parameter(0)
      b = bf16[{",".join(map(str, rest))}] parameter(1)"""
    if kernel == "all-gather-matmul":
        return module_of(f"""ENTRY e {{ {operands}
          g = bf16[{devices * m},{k}] all-gather(a), dimensions={{0}}, {GLOBAL}
          ROOT r = bf16[{devices * m}{n}] dot(g, b), {ROWS_BY} }}""")
    assert devices == 2
    if kernel == "matmul-all-to-all":
        return module_of(f"""ENTRY e {{ {operands}
          p = {whole} dot(a, b), {ROWS_BY}
          ROOT r = {whole} all-to-all(p), dimensions={{0}}, replica_groups={{{{0,1}}}} }}""")
    exchanges = kernel == "matmul-reduce-scatter"
    rows = m // 2 if exchanges else m
    got = f"bf16[{2 * rows}{n}]"
    collective = (
        f"{got} all-to-all(p), dimensions={{0}}, replica_groups={{{{0,1}}}}"
        if exchanges
        else f"{got} all-gather(p), dimensions={{0}}, {GLOBAL}"
    )
    part, columns = f"bf16[{rows}{n}]", f", [0:{rest[1]}]" if n else ""
    return module_of(f"""ENTRY e {{ {operands}
      p = {whole} dot(a, b), {ROWS_BY}
      c = {collective}
      first = {part} slice(c), slice={{[0:{rows}]{columns}}}
      second = {part} slice(c), slice={{[{rows}:{2 * rows}]{columns}}}
      ROOT r = {part} add(first, second) }}""")


def fuser(program: Program, move: Fuse) -> None:
    fuse.fuse(program, move, stand_in)


def found(module: bytes) -> tuple[Move, ...]:
    return kernel_schedules(module, {}, copies=False, lower=stand_in)["fused-kernels"]


def fuse_of(module: bytes) -> Fuse:
    (move,) = found(module)
    assert isinstance(move, Fuse)
    return move


def fused(module: bytes) -> bytes:
    return apply_moves(module, found(module), copies=False, fuser=fuser)


def on_replicas(module: bytes) -> bytes:
    """Where an all-to-all runs here, it has no channel."""
    made = parse(module)
    for one in (one for inside in made.computations for one in inside.instructions):
        one.channel_id = 0 if one.opcode == "all-to-all" else one.channel_id
    return serialize(made)


def same_numbers(module: bytes, made: bytes) -> None:
    """Whole numbers, so that every sum is exact but for its last rounding."""
    rng = np.random.default_rng(3)
    parameters = [i for i in Program(module).instructions if i.opcode == "parameter"]
    types = {16: jnp.bfloat16, 11: np.float32}
    shards = [
        [rng.integers(-2, 3, tuple(i.shape.dimensions)).astype(types[i.shape.element_type]) for _ in range(2)]
        for i in sorted(parameters, key=lambda one: one.parameter_number)
    ]
    for new, old in zip(run_early(made, shards), run_early(on_replicas(module), shards), strict=True):
        np.testing.assert_array_equal(new.astype(np.float32), old.astype(np.float32))


def entry(body: str) -> bytes:
    return module_of(f"{ADD}\nENTRY e {{{body}}}")


# XLA gives a module of one device its replicas, not its partitions, when it runs here: no own shard is found.
@pytest.mark.parametrize("name", [name for name, (body, _) in FOUND.items() if "partition-id" not in body])
def test_every_pair_becomes_a_kernel_and_gives_the_same_numbers(name: str) -> None:
    module = entry(FOUND[name][0])
    made = fused(module)
    assert not {"reduce-scatter", "all-reduce"} & set(opcodes(made))
    assert (opcodes(made).count("all-to-all") == 1) == ("all-to-all" in name or "scatter" in name)
    assert opcodes(made).count("dot") == 1
    same_numbers(module, made)


@pytest.mark.parametrize("name", [name for name, (body, _) in FOUND.items() if "partition-id" in body])
def test_an_own_shard_is_scattered_and_another_piece_read_of_the_sum(name: str) -> None:
    body, expected = FOUND[name]
    made = opcodes(fused(entry(body)))
    scatters = expected["kernel"] == "matmul-reduce-scatter"
    assert ("all-to-all" in made, "dynamic-slice" in made) == (scatters, not scatters)
    assert "all-reduce" not in made


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("dimension", [0, -1])
def test_every_way_round_a_scattered_product_gives_the_same_numbers(
    rank: int, first: int, second: int, dimension: int
) -> None:
    kept = [256, 2][: rank - 1]
    a = ",".join(map(str, [256, *kept] if first == 0 else [*kept, 256]))
    b = "256,512" if second == 0 else "512,256"
    result = [*kept, 512]
    shard = list(result)
    shard[dimension] //= 2
    module = entry(f"""
      a = bf16[{a}] parameter(0)
      b = bf16[{b}] parameter(1)
      d = bf16[{",".join(map(str, result))}] dot(a, b), lhs_contracting_dims={{{0 if first == 0 else len(kept)}}},
        rhs_contracting_dims={{{second}}}
      ROOT r = bf16[{",".join(map(str, shard))}] reduce-scatter(d), dimensions={{{dimension % rank}}}, {SUM}""")
    same_numbers(module, fused(module))


LOOP = f"""{ADD}
body {{
  s = (s32[], bf16[512,512], bf16[3,256,512]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = bf16[512,512] get-tuple-element(s), index=1
  w = bf16[3,256,512] get-tuple-element(s), index=2
  one = s32[] constant(1)
  z = s32[] constant(0)
  p = bf16[1,256,512] dynamic-slice(w, i, z, z), dynamic_slice_sizes={{1,256,512}}
  h = bf16[256,512] reshape(p)
  g = bf16[512,512] all-gather(h), dimensions={{0}}, {GLOBAL}
  d = bf16[512,512] dot(x, g), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  j = s32[] add(i, one)
  ROOT t = (s32[], bf16[512,512], bf16[3,256,512]) tuple(j, d, w)
}}
condition {{
  s = (s32[], bf16[512,512], bf16[3,256,512]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(3)
  ROOT c = pred[] compare(i, n), direction=LT
}}
ENTRY e {{
  x = bf16[512,512] parameter(0)
  w = bf16[3,256,512] parameter(1)
  v = f32[512] parameter(2)
  beside = f32[1024] all-gather(v), dimensions={{0}}, {GLOBAL.replace("=1", "=2")}
  z = s32[] constant(0)
  s = (s32[], bf16[512,512], bf16[3,256,512]) tuple(z, x, w)
  l = (s32[], bf16[512,512], bf16[3,256,512]) while(s), body=body, condition=condition
  y = bf16[512,512] get-tuple-element(l), index=1
  d = bf16[512,512] dot(y, x), {ROWS_BY}
  r = bf16[512,512] all-reduce(d), {SUM.replace("=1", "=3")}
  q = bf16[512,512] all-reduce(y), {SUM.replace("=1", "=4")}
  ROOT t = (bf16[512,512], bf16[512,512], f32[1024]) tuple(r, q, beside)
}}"""


def above(program: Program, instruction: Message) -> set[int]:
    """All that an instruction waits for."""
    before = [*instruction.operand_ids, *instruction.control_predecessor_ids]
    return set(before).union(*(above(program, program.by_id[one]) for one in before))


def test_a_loop_has_its_kernel_and_nothing_communicates_beside_one() -> None:
    module = module_of(LOOP)
    move = fuse_of(module)
    assert [(pair.kernel, len(pair.loop)) for pair in move.pairs] == [
        ("matmul-all-reduce", 0),
        ("all-gather-matmul", 1),
    ]
    made = fused(module)
    program = Program(made)
    kernels = [one for one in program.instructions if one.opcode == "while" or one.name.startswith("kernel.")]
    kernels = [one for one in kernels if one.opcode in ("while", "all-gather")]
    others = [one for one in program.instructions if one.name in ("beside", "q")]
    assert (len(kernels), len(others)) == (2, 2)
    for kernel in kernels:
        for other in others:
            assert other.id in above(program, kernel) or kernel.id in above(program, other)
    same_numbers(module, made)


def test_two_loops_that_share_a_body_keep_it() -> None:
    """A kernel would be in both, of which one is ordered with the other kernels."""
    module = module_of(
        LOOP.replace(
            "y = bf16[512,512] get-tuple-element(l), index=1",
            """f = bf16[512,512] get-tuple-element(l), index=1
  again = (s32[], bf16[512,512], bf16[3,256,512]) tuple(z, f, w)
  k = (s32[], bf16[512,512], bf16[3,256,512]) while(again), body=body, condition=condition
  y = bf16[512,512] get-tuple-element(k), index=1""",
        )
    )
    loops = [n for n, one in enumerate(Program(module).instructions) if one.opcode == "while"]
    assert len(loops) == 2
    move = fuse_of(module)
    assert [(pair.kernel, pair.loop) for pair in move.pairs] == [("matmul-all-reduce", ())]
    same_numbers(module, fused(module))
    (_, inside) = fuse_of(module_of(LOOP)).pairs
    for loop in loops:
        elsewhere = Fuse((*move.pairs, replace(inside, loop=(loop,))))
        with pytest.raises(IllegalMoveError, match="another instruction calls its body or condition too"):
            apply_moves(module, [elsewhere], copies=False, fuser=fuser)


def test_a_kernel_reads_and_writes_no_piece_of_an_array() -> None:
    """XLA:GPU would put both into one fusion with it."""
    module = entry(f"""
      x = bf16[2,512,512] parameter(0)
      w = bf16[512,512] parameter(1)
      i = s32[] constant(1)
      z = s32[] constant(0)
      p = bf16[1,512,512] dynamic-slice(x, i, z, z), dynamic_slice_sizes={{1,512,512}}
      y = bf16[512,512] reshape(p)
      d = bf16[512,512] dot(y, w), {ROWS_BY}
      r = bf16[512,512] all-reduce(d), {SUM}
      q = bf16[1,512,512] reshape(r)
      ROOT u = bf16[2,512,512] dynamic-update-slice(x, q, i, z, z)""")
    made = fused(module)
    program = Program(made)
    barriers = [one for one in program.instructions if one.opcode == "opt-barrier"]
    (before,), (behind,) = (program.operands(one) for one in barriers)
    assert (before.opcode, behind.opcode) == ("reshape", "add")
    same_numbers(module, made)


TWO_PAIRS = f"""x = bf16[512,512] parameter(0)
  d = bf16[512,512] dot(x, x), {ROWS_BY}
  e = bf16[512,512] dot(x, x), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  r = bf16[512,512] all-reduce(d), {SUM}
  q = bf16[512,512] all-reduce(e), {SUM.replace("=1", "=2")}
  ROOT t = (bf16[512,512], bf16[512,512]) tuple(r, q)"""


def test_two_kernels_have_one_order() -> None:
    program = Program(fused(entry(TWO_PAIRS)))
    kernels = [one for one in program.instructions if one.opcode == "all-gather"]
    assert [list(one.control_predecessor_ids) for one in kernels] == [[], [kernels[0].id]]


CUT_BESIDE = f"""x = bf16[512,512] parameter(0)
  v = bf16[512,512] parameter(1)
  d = bf16[512,512] dot(x, x), {ROWS_BY}
  r = bf16[512,512] all-reduce(d), {SUM}
  q = bf16[512,512] all-reduce(v), {SUM.replace("=1", "=2")}
  p = u32[] partition-id()
  c = u32[] constant(256)
  z = s32[] constant(0)
  i = u32[] multiply(p, c)
  start = s32[] convert(i)
  READS
  ROOT t = (bf16[512,512], bf16[256,512]) tuple(r, s)"""


@pytest.mark.parametrize(
    ("reads", "read_by"),
    [
        ("s = bf16[256,512] dynamic-slice(q, start, z), dynamic_slice_sizes={256,512}", None),
        ("s = bf16[256,512] dynamic-slice(q, z, z), dynamic_slice_sizes={256,512}", "opt-barrier"),
        (
            """w = bf16[512,2,256] reshape(q)
            y = bf16[256,2,256] dynamic-slice(w, start, z, z), dynamic_slice_sizes={256,2,256}
            s = bf16[256,512] reshape(y)""",
            "opt-barrier",
        ),
    ],
    ids=["its own shard", "another piece", "its own shard through a reshape"],
)
def test_xla_finds_no_sum_to_scatter_beside_a_kernel(reads: str, read_by: str | None) -> None:
    """It removes the sum, and fails where a kernel waits for that: all-reduces of gradients of an unrolled step."""
    program = Program(fused(entry(CUT_BESIDE.replace("READS", reads))))
    (kernel,) = [one for one in program.instructions if one.opcode == "all-gather"]
    (other,) = [one for one in program.instructions if one.opcode in ("all-reduce", "reduce-scatter")]
    assert other.id in above(program, kernel) or kernel.id in above(program, other)
    assert not other.control_predecessor_ids
    if read_by is None:
        assert (other.opcode, list(other.dimensions), other.shape.dimensions[0]) == (
            "reduce-scatter",
            [0],
            256,
        )
    else:
        assert [other.opcode, *(one.opcode for one in program.readers(other))] == ["all-reduce", read_by]


def test_a_sum_that_says_where_a_piece_begins_is_not_cut() -> None:
    reads = """n = s32[] constant(1)
      counted = s32[] all-reduce(n), to_apply=count, channel_id=5, replica_groups={{0,1}}, use_global_device_ids=true
      s = bf16[256,512] dynamic-slice(q, counted, z), dynamic_slice_sizes={256,512}"""
    count = "count { l = s32[] parameter(0) m = s32[] parameter(1) ROOT n = s32[] add(l, m) }"
    body = CUT_BESIDE.replace("READS", reads)
    made = fused(module_of(f"{ADD}\n{count}\nENTRY e {{{body}}}"))
    assert "reduce-scatter" not in opcodes(made)


def test_a_sum_of_an_odd_number_of_rows_is_no_shards() -> None:
    """Of three rows each of two devices takes one."""
    reads = """o = bf16[3,512] slice(q), slice={[0:3], [0:512]}
      sum = bf16[3,512] all-reduce(o), to_apply=add, channel_id=5, replica_groups={{0,1}}, use_global_device_ids=true
      own = s32[] convert(p)
      s = bf16[1,512] dynamic-slice(sum, own, z), dynamic_slice_sizes={1,512}"""
    body = CUT_BESIDE.replace("READS", reads).replace("bf16[256,512]) tuple", "bf16[1,512]) tuple")
    assert "reduce-scatter" not in opcodes(fused(entry(body)))


def test_a_matmul_of_two_gathered_operands_is_taken_once() -> None:
    body = f"""v = bf16[256,512] parameter(0)
      w = bf16[256,512] parameter(1)
      g = bf16[512,512] all-gather(v), dimensions={{0}}, {GLOBAL}
      h = bf16[512,512] all-gather(w), dimensions={{0}}, {GLOBAL.replace("=1", "=2")}
      ROOT d = bf16[512,512] dot(g, h), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}"""
    module = entry(body)
    move = fuse_of(module)
    assert len(move.pairs) == 1
    same_numbers(module, fused(module))


def test_a_schedule_that_begins_with_other_moves_ends_with_kernels() -> None:
    body, _ = FOUND["an all-reduce of the product"]
    module = entry(body)
    at = next(n for n, one in enumerate(Program(module).instructions) if one.opcode == "all-reduce")
    made = kernel_schedules(module, {"split": (Split(at, 0),)}, copies=False, lower=stand_in)
    (_, move) = made["split-fused-kernels"]
    assert isinstance(move, Fuse)
    assert [pair.kernel for pair in move.pairs] == ["matmul-reduce-scatter"]
    same_numbers(module, apply_moves(module, made["split-fused-kernels"], copies=False, fuser=fuser))


def test_a_plan_holds_kernels_and_tiles() -> None:
    moves = found(module_of(LOOP))
    data = to_json(moves)
    assert from_json(data) == moves
    assert data[0]["pairs"][0]["tiles"]["tile_m"] == MatmulTiles().tile_m
    pair = data[0]["pairs"][0]
    data[0]["pairs"] = [pair | {"surprise": 1}]
    with pytest.raises(PlanError, match=r"structural moves: .*unknown field `surprise` - at `\$\[0\].pairs"):
        from_json(data)
    data[0]["pairs"] = [pair | {"tiles": {"tile_m": [1]}}]
    with pytest.raises(PlanError, match=r"structural moves: .*at `\$\[0\].pairs\[0\].tiles"):
        from_json(data)


def _changed(**fields: Any) -> Fuse:
    move = fuse_of(module_of(LOOP))
    return Fuse((replace(move.pairs[0], **fields), *move.pairs[1:]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kernel": "all-gather-matmul"}, "matmul-all-reduce takes it with d.1, expected all-gather-matmul"),
        ({"collective": 0}, "expected all-reduce: the move was made for another module"),
        ({"matmul": 0}, "expected dot"),
        ({"tiles": {"tile_m": "large"}}, "its tiles are none"),
        ({"tiles": {"tile_m": 7}}, "tile_m = 7"),
        ({"tiles": {"tile_q": 7}}, "its tiles are none: unknown field 'tile_q'"),
        ({"loop": (0,)}, "expected while"),
    ],
)
def test_a_pair_of_another_module_is_refused(fields: dict[str, Any], says: str) -> None:
    def refuses(program: Program, move: Fuse) -> None:
        def lower(kernel: str, tiles: MatmulTiles, *rest: Any) -> bytes:
            if tiles.tile_m % 64:
                raise KernelRefusedError(f"tile_m = {tiles.tile_m}")
            return stand_in(kernel, tiles, *rest)

        fuse.fuse(program, move, lower)

    with pytest.raises(IllegalMoveError, match=re.escape(says)):
        apply_moves(module_of(LOOP), [_changed(**fields)], copies=False, fuser=refuses)


def test_a_matmul_of_two_pairs_is_refused() -> None:
    (move,) = found(entry(TWO_PAIRS))
    assert isinstance(move, Fuse)
    first, second = move.pairs
    twice = Fuse((first, replace(second, matmul=first.matmul)))
    with pytest.raises(IllegalMoveError, match="another pair has its matmul"):
        apply_moves(entry(TWO_PAIRS), [twice], copies=False, fuser=fuser)


def test_no_kernel_where_there_is_nobody_to_lower_it() -> None:
    with pytest.raises(IllegalMoveError, match="run on GPUs alone"):
        apply_moves(module_of(LOOP), found(module_of(LOOP)), copies=False)


def test_a_schedule_with_kernels_is_there_for_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "lowered", stand_in)
    early = Early(module_of(LOOP), "", copies=False, devices=tuple(jax.devices()))
    assert "fused-kernels" not in named_schedules(early, ["fused-kernels"]), "these are CPUs"
    with pytest.raises(IllegalMoveError, match="needs GPUs of compute capability"):
        early.moved(to_json(found(early.module)))
    monkeypatch.setattr(structure, "refuse_machine", lambda _: None)
    assert "fused-kernels" not in named_schedules(early)
    seen: list[tuple[str, str, bool]] = []

    def pays(call: Call, opcode: str, in_loop: bool) -> bool:
        seen.append((call.kernel, opcode, in_loop))
        return opcode == "all-gather"

    (chosen,) = from_json(named_schedules(early, pays=pays)["fused-kernels"])
    assert isinstance(chosen, Fuse)
    assert [pair.kernel for pair in chosen.pairs] == ["all-gather-matmul"]
    assert set(seen) >= {
        ("all-gather-matmul", "all-gather", True),
        ("matmul-all-reduce", "all-reduce", False),
    }
    assert "fused-kernels" not in named_schedules(early, pays=lambda *_: False)
    asked = named_schedules(early, ["fused-kernels"])["fused-kernels"]
    assert early.moved(asked) == fused(early.module)


def test_no_pair_no_schedule() -> None:
    assert kernel_schedules(entry("ROOT x = bf16[8] parameter(0)"), {}, copies=False, lower=stand_in) == {}


def on_hopper(
    kernel: str, tiles: Any, devices: int, shapes: tuple[Shape, ...], recipe: Recipe | None = None
) -> bytes:
    return lowered(kernel, dataclasses.replace(tiles, blocks=MULTIPROCESSORS), devices, shapes, recipe)


def of_mosaic(module: bytes) -> bytes:
    """A module with the kernels themselves."""
    (move,) = kernel_schedules(module, {}, copies=False, lower=on_hopper)["fused-kernels"]
    return apply_moves(module, [move], copies=False, fuser=lambda *both: fuse.fuse(*both, on_hopper))


@pytest.mark.parametrize("name", ["gathered rows", "a reduce-scatter", "an all-reduce through a reshape"])
def test_xla_takes_the_kernel_itself_up_to_its_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU verifies, lays out and orders the module, and then has no such kernel."""
    monkeypatch.setattr(collective_matmul_mgpu, "jax", JaxOnHopper())
    body = FOUND[name][0].replace("{{0,1}}", "{{0,1,2,3}}").replace("bf16[256,512]", "bf16[128,512]")
    module = entry(body.replace("bf16[2,128,512]", "bf16[2,256,512]"))
    made = of_mosaic(module)
    (kernel,) = [one for one in Program(made).instructions if one.opcode == "custom-call"]
    assert (kernel.custom_call_target, kernel.custom_call_has_side_effect) == ("mosaic_gpu_v2", True)
    (node,) = [one for one in canonicalize(made).graph.nodes if one.opcode == "custom-call"]
    assert node.flops == 2 * 512**3, "what it takes is foretold as of a matmul"
    lowered.cache_clear()
    assert of_mosaic(module) == made, "every rank, and every later run, makes the same"
    with pytest.raises(jax.errors.JaxRuntimeError, match="No FFI handler registered for mosaic_gpu_v2"):
        same_numbers(made, made)


def test_kernels_of_other_tiles_are_other_ops() -> None:
    """A time measured of one must not be taken for the other's."""
    module = entry(FOUND["a reduce-scatter"][0])

    def key(tiles: dict[str, Any]) -> str:
        move = fuse_of(module)
        moved = Fuse((replace(move.pairs[0], tiles=tiles),))
        made = apply_moves(module, [moved], copies=False, fuser=lambda *both: fuse.fuse(*both, on_hopper))
        return canonicalize(made).graph.key

    assert key({"split": "n"}) == key({}) != key({"split": "m"})


def test_tiles_that_jax_does_not_take_are_refused_in_words() -> None:
    whole = ((512, 512), "bf16")
    with pytest.raises(KernelRefusedError, match=r"matmul-all-reduce: JAX does not lower it with .*tile_n=8"):
        on_hopper("matmul-all-reduce", MatmulTiles(tile_n=8), 4, (whole, whole))


def custom_call(kernel: str, _: Any, devices: int, shapes: tuple[Shape, ...]) -> bytes:
    """A kernel as the move sees it."""
    (m, k), (_, n) = (shape for shape, _ in shapes)
    rows = devices * m if kernel == "all-gather-matmul" else m
    return module_of(f"""ENTRY e {{
      a = bf16[{m},{k}] parameter(0)
      b = bf16[{k},{n}] parameter(1)
      ROOT r = bf16[{rows},{n}] custom-call(a, b), custom_call_target="mosaic_gpu_v2" }}""")


@pytest.mark.parametrize(("in_loop", "opcode"), [(False, "custom-call"), (True, "while")])
def test_what_is_kept_apart_stays_so_in_a_plan(in_loop: bool, opcode: str) -> None:
    """A plan's order is free but for what canonical form knows of."""
    module = module_of(LOOP)
    move = fuse_of(module)
    one = Fuse(tuple(pair for pair in move.pairs if bool(pair.loop) == in_loop))
    made = apply_moves(
        module, [one], copies=False, fuser=lambda program, move: fuse.fuse(program, move, custom_call)
    )
    graph = canonicalize(made).graph
    units = unit_graph(graph, unfused(graph))
    of_node = {node: number for number, unit in enumerate(units.units) for node in unit.nodes}
    waits: dict[int, set[int]] = {}
    for number in TopologicalSorter(dict(enumerate(units.dependencies))).static_order():
        before = units.dependencies[number]
        waits[number] = {*before}.union(*(waits[one] for one in before))
    (kernel,) = [of_node[node.id] for node in graph.nodes if node.opcode == opcode]
    for node in graph.nodes:
        if node.kind is Kind.COLLECTIVE:
            assert kernel in waits[of_node[node.id]] or of_node[node.id] in waits[kernel], node.opcode
