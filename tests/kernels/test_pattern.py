"""Pairs of matmul and collective as XLA writes them, found; every near miss, refused for its reason."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from disco_hlo.kernels.pattern import COLLECTIVES, FusedCall, fused_call, fused_calls
from disco_hlo.kernels.update_pattern import MissedError
from disco_hlo.structure.program import Program
from tests.modules import module_of
from tests.structure.enact import handed_over
from tests.structure.steps import mesh

ADD = """
add { a = bf16[] parameter(0)
      b = bf16[] parameter(1)
      ROOT s = bf16[] add(a, b) }
max { a = bf16[] parameter(0)
      b = bf16[] parameter(1)
      ROOT s = bf16[] maximum(a, b) }
"""
GLOBAL = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"
SUM = f"{GLOBAL}, to_apply=add"


def among(groups: str) -> str:
    """A sum over these groups of devices."""
    return SUM.replace("{{0,1}}", groups)


def misses(module: bytes) -> list[str]:
    """Why no kernel takes collectives of a module."""
    program, found = Program(module), []
    for inside in (program.inside(one.id) for one in program.module.computations):
        for collective in (one for one in inside.instructions if one.opcode in COLLECTIVES):
            try:
                fused_call(inside, collective)
            except MissedError as missed:
                found.append(str(missed))
    return found


def found(body: str) -> tuple[list[FusedCall], list[str]]:
    """Calls of an entry computation on two devices, and why others are none."""
    module = module_of(f"{ADD}\nENTRY e {{{body}}}")
    return fused_calls(module), misses(module)


def gathered(
    reads: str, shard: str = "bf16[256,512]", whole: str = "bf16[512,512]", dimension: int = 0
) -> str:
    return f"""
      w = {shard} parameter(0)
      x = bf16[512,512] parameter(1)
      g = {whole} all-gather(w), dimensions={{{dimension}}}, {GLOBAL}
      {reads}"""


def summed(reads: str, k: int = 512, dot: str = "lhs_contracting_dims={1}, rhs_contracting_dims={0}") -> str:
    return f"""
      x = bf16[512,{k}] parameter(0)
      w = bf16[{k},512] parameter(1)
      d = bf16[512,512] dot(x, w), {dot}
      {reads}"""


ROWS_BY = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
EXCHANGE = "dimensions={0}, replica_groups={{0,1}}, channel_id=1"
OWN_SHARD = """
      p = u32[] partition-id()
      c = u32[] constant(256)
      z = s32[] constant(0)
      i = u32[] multiply(p, c)
      start = s32[] convert(i)
      r = bf16[512,512] all-reduce(d), """

FOUND: dict[str, tuple[str, dict[str, Any]]] = {
    "gathered rows": (gathered(f"ROOT r = bf16[512,512] dot(g, x), {ROWS_BY}"),
        {"kernel": "all-gather-matmul", "m": 256, "k": 512, "n": 512, "swapped": False}),
    "through a reshape and a conversion": (gathered(
            f"""h = f32[512,512] reshape(g)
            c = bf16[512,512] convert(h)
            ROOT r = bf16[512,512] dot(c, x), {ROWS_BY}""",
            "f32[1,256,512]",
            "f32[1,512,512]",
            1,
        ), {"kernel": "all-gather-matmul", "m": 256}),
    "through a transpose": (gathered(
            f"""t = bf16[512,512] transpose(g), dimensions={{1,0}}
            ROOT r = bf16[512,512] dot(t, x), {ROWS_BY}""",
            "bf16[512,256]",
            "bf16[512,512]",
            1,
        ), {"kernel": "all-gather-matmul", "m": 256, "first_transposed": False}),
    "weights gathered along what they keep, as in a backward pass": (
        gathered("ROOT r = bf16[512,512] dot(x, g), lhs_contracting_dims={1}, rhs_contracting_dims={1}"),
        {"kernel": "all-gather-matmul", "swapped": True, "first_transposed": False, "second_transposed": True}),
    "an all-reduce of the product": (summed(f"ROOT r = bf16[512,512] all-reduce(d), {SUM}"),
        {"kernel": "matmul-all-reduce", "m": 512, "k": 512, "n": 512, "swapped": False}),
    "an all-to-all of the product": (summed(f"ROOT r = bf16[512,512] all-to-all(d), {EXCHANGE}"),
        {"kernel": "matmul-all-to-all", "m": 512, "k": 512, "n": 512, "swapped": False}),
    "an all-to-all of columns": (
        summed(f"ROOT r = bf16[512,512] all-to-all(d), {EXCHANGE.replace('{0},', '{1},')}"),
        {"kernel": "matmul-all-to-all", "swapped": True}),
    "an all-to-all through a reshape": (
        summed(f"h = bf16[2,256,512] reshape(d)\n ROOT r = bf16[2,256,512] all-to-all(h), {EXCHANGE}"),
        {"kernel": "matmul-all-to-all", "m": 512}),
    "an all-reduce through a reshape": (
        summed(f"h = bf16[2,256,512] reshape(d)\n ROOT r = bf16[2,256,512] all-reduce(h), {SUM}"),
        {"kernel": "matmul-all-reduce"}),
    "operands the other way round": (summed(
            f"ROOT r = bf16[512,512] all-reduce(d), {SUM}",
            512,
            "lhs_contracting_dims={0}, rhs_contracting_dims={1}",
        ), {"kernel": "matmul-all-reduce", "first_transposed": True, "second_transposed": True}),
    "a vector": (f"""x = bf16[512,512] parameter(0)
        v = bf16[512] parameter(1)
        d = bf16[512] dot(x, v), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
        ROOT r = bf16[512] all-reduce(d), {SUM}""",
        {"kernel": "matvec-all-reduce", "m": 512, "n": 1, "swapped": False}),
    "a vector first": (f"""x = bf16[1,512] parameter(0)
        w = bf16[512,512] parameter(1)
        d = bf16[1,512] dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
        ROOT r = bf16[1,512] all-reduce(d), {SUM}""",
        {"kernel": "matvec-all-reduce", "m": 512, "n": 1, "swapped": True, "first_transposed": True}),
    "a reduce-scatter": (summed(f"ROOT r = bf16[256,512] reduce-scatter(d), dimensions={{0}}, {SUM}"),
        {"kernel": "matmul-reduce-scatter", "m": 512, "swapped": False}),
    "a reduce-scatter of columns": (
        summed(f"ROOT r = bf16[512,256] reduce-scatter(d), dimensions={{1}}, {SUM}"),
        {"kernel": "matmul-reduce-scatter", "swapped": True}),
    "an all-reduce of which the own shard is read": (summed(
            f"{OWN_SHARD}{SUM}\n ROOT s = bf16[256,512] dynamic-slice(r, start, z), dynamic_slice_sizes={{256,512}}"
        ), {"kernel": "matmul-reduce-scatter", "m": 512}),
    "an all-reduce of which all read the same piece": (summed(
            f"{OWN_SHARD}{SUM}\n ROOT s = bf16[256,512] dynamic-slice(r, z, z), dynamic_slice_sizes={{256,512}}"
        ), {"kernel": "matmul-all-reduce", "m": 512}),
}  # fmt: skip

MISSED: dict[str, tuple[str, str]] = {
    "sums over what was gathered": (
        "sums over the gathered dimension",
        gathered(f"ROOT r = bf16[512,512] dot(x, g), {ROWS_BY}"),
    ),
    "something else reads it, too": (
        "is read by",
        gathered(f"d = bf16[512,512] dot(g, x), {ROWS_BY}\n ROOT r = (bf16[512,512], bf16[512,512]) tuple(d, g)"),
    ),
    "it is the result": (
        "the program returns",
        f"w = bf16[256] parameter(0)\n ROOT g = bf16[512] all-gather(w), dimensions={{0}}, {GLOBAL}",
    ),
    "an addition comes first": (
        "reads it first",
        gathered(f"a = bf16[512,512] add(g, x)\n ROOT r = bf16[512,512] dot(a, x), {ROWS_BY}"),
    ),
    "multiplied by itself": (
        "multiplies it by itself",
        gathered("ROOT r = bf16[512,512] dot(g, g), lhs_contracting_dims={1}, rhs_contracting_dims={1}"),
    ),
    "shards that a reshape takes apart": (
        "does not keep the shards together",
        gathered(
            f"h = bf16[512,512] reshape(g)\n ROOT r = bf16[512,512] dot(h, x), {ROWS_BY}",
            "bf16[4,64,512]",
            "bf16[4,128,512]",
            1,
        ),
    ),
    "a dimension behind another": (
        "is not the first that",
        gathered(
            "ROOT r = bf16[4,128,512] dot(g, x), lhs_contracting_dims={2}, rhs_contracting_dims={0}",
            "bf16[4,64,512]",
            "bf16[4,128,512]",
            1,
        ),
    ),
    "float32": (
        "multiplies f32 by f32",
        gathered(
            f"""y = f32[512,512] convert(x)
            ROOT r = f32[512,512] dot(g, y), {ROWS_BY}""",
            "f32[256,512]",
            "f32[512,512]",
        ),
    ),
    "a batch": (
        "has batch dimensions",
        f"""x = bf16[4,512,512] parameter(0)
        y = bf16[4,512,512] parameter(1)
        d = bf16[4,512,512] dot(x, y), lhs_batch_dims={{0}}, rhs_batch_dims={{0}},
          lhs_contracting_dims={{2}}, rhs_contracting_dims={{1}}
        ROOT r = bf16[4,512,512] all-reduce(d), {SUM}""",
    ),
    "two dimensions at once": (
        "sums over 2 dimensions",
        f"""x = bf16[512,8,64] parameter(0)
        y = bf16[8,64,512] parameter(1)
        d = bf16[512,512] dot(x, y), lhs_contracting_dims={{1,2}}, rhs_contracting_dims={{0,1}}
        ROOT r = bf16[512,512] all-reduce(d), {SUM}""",
    ),
    "a dimension between those it keeps": (
        "others lie on both sides of it",
        f"""x = bf16[4,512,128] parameter(0)
        y = bf16[512,512] parameter(1)
        d = bf16[4,128,512] dot(x, y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
        ROOT r = bf16[4,128,512] all-reduce(d), {SUM}""",
    ),
    "too little to sum over": ("no tiles divide it", summed(f"ROOT r = bf16[512,512] all-reduce(d), {SUM}", 64)),
    "a maximum": ("it applies maximum", summed(f"ROOT r = bf16[512,512] all-reduce(d), {GLOBAL}, to_apply=max")),
    "a product converted before it is summed": (
        "makes another type of the partial sums",
        summed(f"h = f16[512,512] convert(d)\n ROOT r = f16[512,512] all-reduce(h), {SUM}"),
    ),
    "a sum of no matmul": (
        "gives what it sums or sends",
        f"x = bf16[512] parameter(0)\n y = bf16[512] add(x, x)\n ROOT r = bf16[512] all-reduce(y), {SUM}",
    ),
    "the product is read elsewhere": (
        "is read by",
        summed(f"r = bf16[512,512] all-reduce(d), {SUM}\n ROOT t = (bf16[512,512], bf16[512,512]) tuple(r, d)"),
    ),
    "two arrays in one": (
        "it has 2 operands",
        summed(f"ROOT r = (bf16[512,512], bf16[512,512]) all-reduce(d, d), {SUM}"),
    ),
    "not one group of all": (
        "a kernel runs on all devices, in order",
        summed(f"ROOT r = bf16[512,512] all-reduce(d), {among('{{0,1},{2,3}}')}"),
    ),
    "devices in another order": (
        "a kernel runs on all devices, in order",
        summed(f"ROOT r = bf16[512,512] all-reduce(d), {among('{{1,0}}')}"),
    ),
    "more devices than a kernel takes": (
        "10 devices; a kernel takes",
        summed(f"ROOT r = bf16[512,512] all-reduce(d), {among('{{0,1,2,3,4,5,6,7,8,9}}')}"),
    ),
    "a control dependency": (
        "waits by a control dependency",
        gathered(f"ROOT r = bf16[512,512] dot(g, x), {ROWS_BY}, control-predecessors={{x}}"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_pair_is_found(name: str) -> None:
    body, expected = FOUND[name]
    (call,), missed = found(body)
    assert missed == []
    assert {field: getattr(call, field) for field in expected} == expected
    assert call.tiles


@pytest.mark.parametrize("name", MISSED)
def test_a_near_miss_is_refused_for_its_reason(name: str) -> None:
    reason, body = MISSED[name]
    calls, (why,) = found(body)
    assert calls == []
    assert reason in why


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("second", [0, 1])
def test_what_a_call_says_of_its_operands_gives_the_product(rank: int, first: int, second: int) -> None:
    """Multiply as the call says, in numpy, and compare with the dot."""
    random = np.random.default_rng(0)
    kept = (2, 128) if rank == 3 else (256,)
    a = random.standard_normal((512, *kept) if first == 0 else (*kept, 512))
    b = random.standard_normal((512, 768) if second == 0 else (768, 512))
    at = 0 if first == 0 else len(kept)
    shapes = [f"bf16[{','.join(map(str, one.shape))}]" for one in (a, b)]
    result = f"bf16[{','.join(map(str, (*kept, 768)))}]"
    body = f"""a = {shapes[0]} parameter(0)
      b = {shapes[1]} parameter(1)
      d = {result} dot(a, b), lhs_contracting_dims={{{at}}}, rhs_contracting_dims={{{second}}}
      ROOT r = {result.replace("768]", "384]")} reduce-scatter(d), dimensions={{{len(kept)}}}, {SUM}"""
    (call,), _ = found(body)
    assert call.swapped, "columns are scattered, so the second operand comes first"
    left = b.T if call.first_transposed else b
    right = a.reshape(512, -1) if first == 0 else a.reshape(-1, 512)
    right = right.T if call.second_transposed else right
    assert (left.shape, right.shape) == ((call.m, call.k), (call.k, call.n))
    np.testing.assert_allclose((left @ right).T.reshape(*kept, 768), np.tensordot(a, b, (at, second)))


def test_a_tensor_parallel_layer_has_its_all_reduces_and_a_loop_is_looked_into() -> None:
    """As XLA:CPU partitions it, whose matmuls are float32: no kernel takes those, and that is the reason given."""
    on = mesh(4)

    def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ weights[0]) @ weights[1], None

    def step(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jax.lax.scan(layer, x, (up, down))[0]

    def placed(spec: Any, *shape: int) -> jax.Array:
        return jax.device_put(jnp.ones(shape, jnp.float32), NamedSharding(on, spec))

    spec = PartitionSpec
    arguments = (
        placed(spec(), 8, 16),
        placed(spec(None, None, "model"), 3, 16, 32),
        placed(spec(None, "model"), 3, 32, 16),
    )
    module = handed_over(step, arguments)
    assert fused_calls(module) == []
    assert ["multiplies f32 by f32" in why for why in misses(module)] == [True]
