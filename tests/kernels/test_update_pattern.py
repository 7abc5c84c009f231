"""A sum, an update and an all-gather: what is taken, as which work, and what is left."""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from disco_hlo.kernels.refusals import OLDEST_JAX

if jax.__version_info__ < OLDEST_JAX:
    pytest.skip(f"jax {jax.__version__} lacks what the kernels use", allow_module_level=True)

from disco_hlo.kernels.pattern import fused_calls
from disco_hlo.kernels.tiles import UPDATE_RANGE
from disco_hlo.kernels.update import by_recipe
from disco_hlo.kernels.update_pattern import Recipe, UpdateCall
from disco_hlo.structure.program import Program
from tests.kernels.test_fuse import of_mosaic, same_numbers
from tests.kernels.test_pattern import ADD, GLOBAL, SUM, misses
from tests.modules import module_of
from tests.structure.enact import handed_over, opcodes

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import sharded_adam


def update(work: str, root: str, elements: int = 4096) -> bytes:
    """Of so many elements on two devices; the texts are written for 4096."""
    text = f"""{ADD}\nENTRY e {{
      g = f32[4096] parameter(0)
      m = f32[2048] parameter(1)
      rate = f32[] parameter(2)
      s = f32[2048] reduce-scatter(g), dimensions={{0}}, {SUM}
      {work}
      {root} }}"""
    return module_of(text.replace("4096", str(elements)).replace("2048", str(elements // 2)))


MOMENTUM = """b = f32[] constant(0.5)
      bs = f32[2048] broadcast(b), dimensions={}
      old = f32[2048] multiply(m, bs)
      new = f32[2048] add(old, s)
      rs = f32[2048] broadcast(rate), dimensions={}
      step = f32[2048] multiply(new, rs)"""
GATHER = f"all = f32[4096] all-gather(step), dimensions={{0}}, {GLOBAL.replace('=1', '=2')}"
ROOT = "ROOT t = (f32[4096], f32[2048]) tuple(all, new)"


def only_call(module: bytes) -> UpdateCall:
    (call,) = fused_calls(module)
    assert isinstance(call, UpdateCall)
    return call


def assert_left(module: bytes, why: str) -> None:
    """No kernel takes it, for this reason."""
    assert fused_calls(module) == []
    assert any(why in one for one in misses(module)), misses(module)


def test_momentum_is_a_recipe_of_what_reads_the_sum_and_what_only_that_reads() -> None:
    call = only_call(update(f"{MOMENTUM}\n{GATHER}", ROOT))
    steps = (("multiply", (1, (0.5).hex())), ("add", (3, 0)), ("multiply", (4, 2)))
    assert call.recipe == Recipe((False,), 1, steps, kept=(4,), gathered=5)
    assert (call.arrays, call.scalars, call.kept) == (("m",), ("rate",), ("new",))
    assert (call.size.m, call.size.k, call.tiles[0]) == (4096, 2, UPDATE_RANGE[0])


def test_the_examples_adam_is_its_work_and_nothing_of_it_is_left() -> None:
    made = sharded_adam.compilable(13)
    random = np.random.default_rng(0)
    p, m, v, gradients = (
        np.asarray(random.uniform(0.1, 1, one.shape), np.float32) for one in made.arguments[:-1]
    )
    count, shard = np.float32(3), 8192 // jax.device_count()
    compiled = made.function.lower(*made.arguments).compile()
    placed = jax.tree.map(jax.device_put, (p, m, v, gradients, count), compiled.input_shardings[0])
    module = handed_over(sharded_adam.adam, placed, out_shardings=compiled.output_shardings)
    call = only_call(module)
    assert (call.elements, call.recipe.whole, call.recipe.scalars) == (8192, (False, False, True), 2)

    own = slice(0, shard)
    scalars = [1 - 0.9**count, 1 - 0.999**count]
    total, arrays = gradients.sum(0)[own], [m[own], v[own], p[own]]
    new, kept = by_recipe(call.recipe)(jnp.asarray(total), jax.tree.map(jnp.asarray, arrays), scalars)
    expected = sharded_adam.adam(p, m, v, gradients, count)
    for a, b in zip((new, *kept), expected, strict=True):
        np.testing.assert_allclose(a, b[own], rtol=1e-6)

    changed = of_mosaic(module)
    left = set(opcodes(changed))
    assert not left & {"all-reduce", "all-gather", "dynamic-slice", "sqrt", "add", "partition-id"}
    assert opcodes(changed).count("custom-call") == 1
    names = [one.name for one in Program(changed).instructions]
    assert call.size.key in " ".join(names)


def test_xla_takes_the_kernel_itself_up_to_its_code() -> None:
    made = of_mosaic(update(f"{MOMENTUM}\n{GATHER}", ROOT))
    with pytest.raises(jax.errors.JaxRuntimeError, match="No FFI handler registered for mosaic_gpu_v2"):
        same_numbers(made, made)


@pytest.mark.parametrize(
    ("work", "root", "says"),
    [
        (MOMENTUM, "ROOT t = (f32[2048], f32[2048]) tuple(step, new)", "nothing made of the shard of s"),
        (f"{MOMENTUM}\n{GATHER}".replace("{{0,1}}", "{{1,0}}"), ROOT, "nothing made of the shard of s"),
        ("", "ROOT t = f32[2048] exponential(s)", "no pointwise work reads the shard of s"),
    ],
)  # fmt: skip
def test_what_no_kernel_takes_is_told(work: str, root: str, says: str) -> None:
    assert_left(update(work, root), says)


def test_shards_that_tiles_do_not_divide_are_left() -> None:
    module = update(f"{MOMENTUM}\n{GATHER}", ROOT, 1000)
    assert_left(module, "1000 elements on 2 devices: no tiles divide them")


def test_a_constant_is_not_the_value_of_its_number() -> None:
    """1.0 equals 1, so one of the two additions was taken for the other."""
    call = only_call(
        update(
            f"""c = f32[] constant(1)
      cs = f32[2048] broadcast(c), dimensions={{}}
      a = f32[2048] add(s, m)
      b = f32[2048] add(s, cs)
      step = f32[2048] multiply(a, b)
      {GATHER}""",
            "ROOT t = (f32[4096]) tuple(all)",
        )
    )
    gathered, _ = by_recipe(call.recipe)(jnp.float32(3), [jnp.float32(10)], [])
    assert gathered == (3 + 10) * (3 + 1)
    other = dataclasses.replace(call.recipe, steps=(("add", (0, 1)), ("add", (0, 1)), ("multiply", (2, 3))))
    assert other != call.recipe
