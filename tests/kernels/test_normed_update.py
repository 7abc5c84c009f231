"""LAMB as optax writes it, and by hand: what is taken, with which numbers, and what is left with which reason."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from disco_hlo.kernels.refusals import OLDEST_JAX

if jax.__version_info__ < OLDEST_JAX:
    pytest.skip(f"jax {jax.__version__} lacks what the kernels use", allow_module_level=True)

from disco_hlo.kernels.normed_update import by_halves
from disco_hlo.kernels.tiles import NORMED_RANGE
from disco_hlo.kernels.update_pattern import UpdateCall
from disco_hlo.structure.program import Program
from tests.kernels.test_fuse import of_mosaic, same_numbers
from tests.kernels.test_pattern import SUM
from tests.kernels.test_update_pattern import GATHER, assert_left, only_call, update
from tests.structure.enact import PLAIN_OPS, handed_over, opcodes

ELEMENTS, EPSILON = 12288, 1e-6
ROWS, WHOLE = PartitionSpec("x"), PartitionSpec()
LAMB = optax.lamb(0.01, weight_decay=0.1)


@pytest.fixture(autouse=True)
def plain_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU splits long sums before its hook; on GPU the hook comes before the pass that does."""
    passes = f"{PLAIN_OPS['xla_disable_hlo_passes']},tree_reduction_rewriter"
    monkeypatch.setitem(PLAIN_OPS, "xla_disable_hlo_passes", passes)


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("x",), axis_types=(AxisType.Auto,))


def module_of_step(optimizer: optax.GradientTransformation, devices: int, dtype: Any = jnp.float32) -> bytes:
    """A step by constraints alone: gradients of each device, moments split, parameters on all."""
    mesh = mesh_of(devices)
    whole, rows = NamedSharding(mesh, WHOLE), NamedSharding(mesh, ROWS)

    def step(parameters: jax.Array, state: Any, gradients: jax.Array) -> Any:
        updates, state = optimizer.update(gradients.sum(0), state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters = jnp.ones(ELEMENTS, dtype)
    state = jax.tree.map(
        lambda one: jax.device_put(one, rows if one.ndim else whole), optimizer.init(parameters)
    )
    gradients = jax.device_put(jnp.ones((devices, ELEMENTS), dtype), rows)
    results = (whole, jax.tree.map(lambda one: one.sharding, state))
    arguments = (jax.device_put(parameters, whole), state, gradients)
    return handed_over(step, arguments, out_shardings=results)


def by_hand(ratio: Callable[[jax.Array, jax.Array], jax.Array], devices: int) -> bytes:
    """A step of moments, parameters and gradients in a `jax.shard_map`, by a ratio of both norms."""

    def local(mean: jax.Array, parameters: jax.Array, gradients: jax.Array) -> Any:
        total = lax.psum_scatter(gradients[0], "x", tiled=True)
        own = lax.dynamic_slice(parameters, (lax.axis_index("x") * total.size,), total.shape)
        mean = 0.5 * mean + total
        direction = mean + 0.1 * own
        norms = [jnp.sqrt(lax.psum(jnp.sum(one * one), "x")) for one in (own, direction)]
        return mean, lax.all_gather(own - ratio(norms[0], norms[1]) * direction, "x", tiled=True)

    mapped = jax.shard_map(
        local, mesh=mesh_of(devices), in_specs=(ROWS, WHOLE, ROWS), out_specs=(ROWS, WHOLE), check_vma=False
    )
    return handed_over(mapped, (jnp.ones(ELEMENTS), jnp.ones(ELEMENTS), jnp.ones((devices, ELEMENTS))))


def stepped(call: UpdateCall, arrays: list[Any], scalars: list[Any], summands: Any) -> list[Any]:
    """What the recipe gives on all devices: the gathered result, and all that they keep."""
    measure, step, _, again = by_halves(call.recipe)
    shards = [np.split(np.asarray(one), call.devices) for one in (summands.sum(0), *arrays)]
    numbers = [jnp.float32(one) for one in scalars]
    first = [
        measure(jnp.asarray(total), [jnp.asarray(one) for one in own], numbers)
        for total, *own in zip(*shards, strict=True)
    ]
    sums = [sum(jnp.sum(term) for term in terms) for terms in zip(*(one[2] for one in first), strict=True)]
    new = []
    for (carried, kept, _), (_, *own) in zip(first, zip(*shards, strict=True), strict=True):
        read = [[*own, *kept][one] for one in again]
        new.append(step(carried, read, numbers, sums))
    return [np.concatenate(one) for one in (new, *zip(*(one[1] for one in first), strict=True))]


def inputs(scale: float, gradient: float, devices: int) -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    parameters = scale * random.normal(size=ELEMENTS).astype(np.float32)
    return parameters, gradient * random.normal(size=(devices, ELEMENTS)).astype(np.float32)


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize(("scale", "gradient"), [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)])
def test_optax_lamb_is_its_work_with_one_norm_of_the_step(
    devices: int, scale: float, gradient: float
) -> None:
    """The norm of the parameters, of which every device has all, is a scalar before it."""
    call = only_call(module_of_step(LAMB, devices))
    assert (call.kernel, call.elements, call.devices) == ("normed-update", ELEMENTS, devices)
    assert (len(call.recipe.sums), call.recipe.scalars, call.recipe.whole) == (1, 3, (False, False, True))
    assert (call.tiles[0], call.size.k) == (NORMED_RANGE[-1 if devices == 4 else 0], 8)

    parameters, gradients = inputs(scale, gradient, devices)
    zeros = np.zeros_like(parameters)
    one = np.float32(1)
    scalars = [one - np.float32(0.9), one - np.float32(0.999), np.linalg.norm(parameters)]
    new, mean, square = stepped(call, [zeros, zeros, parameters], scalars, gradients)
    updates, state = LAMB.update(
        jnp.asarray(gradients.sum(0)), LAMB.init(jnp.asarray(parameters)), jnp.asarray(parameters)
    )
    expected = (parameters + np.asarray(updates), state[0].mu, state[0].nu)
    for a, b in zip((new, mean, square), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-8)


def plain(of_parameters: jax.Array, of_step: jax.Array) -> jax.Array:
    return of_parameters / of_step


def with_epsilon(of_parameters: jax.Array, of_step: jax.Array) -> jax.Array:
    return of_parameters / (of_step + EPSILON)


def guarded(of_parameters: jax.Array, of_step: jax.Array) -> jax.Array:
    known = (of_parameters > 0) & (of_step > 0)
    return jnp.where(known, of_parameters / jnp.where(known, of_step, 1), 1)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("ratio", [plain, with_epsilon, guarded])
@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_a_step_by_hand_has_both_norms_and_its_own_guard(
    ratio: Callable[[jax.Array, jax.Array], jax.Array], devices: int, scale: float
) -> None:
    """No form of LAMB is known: whatever stands there is worked, so none passes for another."""
    call = only_call(by_hand(ratio, devices))
    assert (len(call.recipe.sums), call.recipe.scalars, len(call.kept)) == (2, 0, 1)
    parameters, gradients = inputs(scale, scale, devices)
    mean = scale * np.ones(ELEMENTS, np.float32)
    assert call.arrays[1].startswith("dynamic_slice"), "the own shard of the parameters"
    arrays = [mean, parameters]
    new, kept = stepped(call, arrays, [], gradients)
    mean = 0.5 * mean + gradients.sum(0)
    step = mean + 0.1 * parameters
    norms = [jnp.float32(np.linalg.norm(one)) for one in (parameters, step)]
    np.testing.assert_allclose(kept, mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(new, parameters - np.asarray(ratio(*norms)) * step, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("make", [partial(module_of_step, LAMB), partial(by_hand, guarded)])
def test_one_kernel_takes_the_place_of_all(make: Callable[[int], bytes], devices: int) -> None:
    module = make(devices)
    made = of_mosaic(module)
    left = opcodes(made)
    assert not {"all-reduce", "reduce-scatter", "all-gather"} & set(left)
    assert left.count("custom-call") == 1
    assert only_call(module).size.key in [one.name for one in Program(made).instructions]


NORM = f"""z = f32[] constant(0)
      square = f32[2048] multiply(s, s)
      sum = f32[] reduce(square, z), dimensions={{0}}, to_apply=add
      norm = f32[] all-reduce(sum), {SUM.replace("=1", "=3")}
      ns = f32[2048] broadcast(norm), dimensions={{}}
      step = f32[2048] divide(s, ns)
      {GATHER}"""
ROOT = "ROOT t = (f32[4096]) tuple(all)"
GUARD = f"""{NORM.replace("step = f32[2048] divide(s, ns)", "")}
      zero = pred[] compare(norm, z), direction=LE
      zeros = pred[2048] broadcast(zero), dimensions={{}}
      safe = f32[2048] select(zeros, ns, s)"""


def test_xla_takes_the_kernel_itself_up_to_its_code() -> None:
    made = of_mosaic(update(NORM, ROOT))
    with pytest.raises(jax.errors.JaxRuntimeError, match="No FFI handler registered for mosaic_gpu_v2"):
        same_numbers(made, made)


@pytest.mark.parametrize(
    ("work", "root", "says"),
    [
        (  # of more than the array
            NORM.replace("all-reduce(sum)", "all-reduce(both)").replace(
                "norm =", "both = f32[] add(sum, rate)\n norm ="
            ),
            ROOT,
            "depends on the sum itself",
        ),
        (  # of this device's shard alone
            NORM.replace("broadcast(norm)", "broadcast(sum)"),
            ROOT,
            "depends on the sum itself",
        ),
        (NORM.replace("f32[] constant(0)", "f32[] constant(1)"), ROOT, "depends on the sum itself"),
        (
            NORM,
            "ROOT t = (f32[4096], f32[]) tuple(all, norm)",
            "norm (all-reduce) is read outside of the update",
        ),
        (
            NORM.replace("step = f32[2048] divide", "kept = f32[2048] divide").replace(
                GATHER, f"step = f32[2048] add(kept, s)\n{GATHER}"
            ),
            "ROOT t = (f32[4096], f32[2048]) tuple(all, kept)",
            "what a device keeps is made of a sum over the array",
        ),
        (
            NORM.replace("step = f32[2048] divide(s, ns)", "scaled = f32[2048] divide(s, ns)").replace(
                GATHER,
                f"""again = f32[] reduce(scaled, z), dimensions={{0}}, to_apply=add
                other = f32[] all-reduce(again), {SUM.replace("=1", "=4")}
                os = f32[2048] broadcast(other), dimensions={{}}
                step = f32[2048] multiply(scaled, os)
                {GATHER}""",
            ),
            ROOT,
            "a sum over the array is made of another",
        ),
        (
            NORM.replace("divide(s, ns)", "divide(square, n)").replace(
                "step =", "sn = f32[2048] multiply(s, ns)\n n = f32[2048] add(sn, ns)\n step ="
            ),
            ROOT,
            "2 values lie between sums and result",
        ),
        (
            f"{GUARD.replace(GATHER, '')}\nstep = f32[2048] add(safe, safe)\n{GATHER}",
            ROOT,
            "safe (select) is of arrays, and read everywhere",
        ),
        (
            NORM.replace("multiply(s, s)", "broadcast(rate), dimensions={}").replace(
                "divide(s, ns)", "multiply(s, ns)"
            ),
            ROOT,
            "a sum over the array is of one number",
        ),
    ],
)
def test_what_is_not_proved_is_left_with_a_reason(work: str, root: str, says: str) -> None:
    assert_left(update(work, root), says)


def test_a_norm_of_one_element_is_a_number() -> None:
    """`jnp.sum(x * x, keepdims=True)` leaves an array of one."""
    work = NORM.replace(
        "norm = f32[] all-reduce(sum)", "sum1 = f32[1] reshape(sum)\n norm = f32[1] all-reduce(sum1)"
    ).replace(
        "ns = f32[2048] broadcast(norm)",
        """same = f32[1] copy(norm)
        root = f32[1] sqrt(same)
        one = f32[] reshape(root)
        ns = f32[2048] broadcast(one)""",
    )
    recipe = only_call(update(work, ROOT)).recipe
    assert recipe.steps == (("multiply", (0, 0)), ("sum", (1,)), ("sqrt", (2,)), ("divide", (0, 3)))


def test_half_precision_is_left() -> None:
    assert_left(module_of_step(LAMB, 2, jnp.bfloat16), "no pointwise work reads the shard of all-reduce")
