"""Collectives of one kind and size, compiled to be timed."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.errors import UnsupportedError
from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.plugin.measuring.collective_chains import Chain
from disco_hlo.plugin.measuring.inputs.made_up import synthetic_values
from disco_hlo.plugin.measuring.microbenchmarks import collective_runner
from disco_hlo.plugin.measuring.runner import Outputs
from disco_hlo.plugin.xla.executables import Parameter, jax_dtype
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.plugin.xla.own_programs import in_clean_thread
from tests.steps.intercept import intercept


@pytest.mark.parametrize(("dtype", "repeats"), [("f32", 1), ("f32", 3), ("bf16", 1)])
def test_the_collective_runner_sums_over_the_devices_of_the_request(dtype: str, repeats: int) -> None:
    def look(request: CompileRequest) -> Outputs:
        sweep = collective_runner(request, 4096, dtype=dtype, repeats=repeats, seed=5)
        assert sweep.run() > 0
        return sweep.outputs()

    split = NamedSharding(Mesh(np.array(jax.devices()[1:4]), ("data",)), PartitionSpec("data"))
    on_three = jax.jit(lambda x: x.sum(), in_shardings=split)
    with jax.default_matmul_precision("float32"), jax.transfer_guard("disallow_explicit"):
        made = intercept(on_three, (jax.ShapeDtypeStruct((6,), np.float32),), look, devices=3)
    element = np.dtype(jax_dtype(dtype))
    parameter = Parameter((4096 // element.itemsize,), element, sharded=True)
    inputs = [synthetic_values(parameter, 5, 0, place).astype(np.float64) for place in range(3)]
    assert [len(per_device) for per_device in made] == [3]
    for found in made[0]:
        assert found.dtype == element
        np.testing.assert_allclose(found.astype(np.float64), sum(inputs) * 3 ** (repeats - 1), rtol=1e-2)


HALVES = ((0, 3), (1, 2))
RING = ((0, 1), (1, 2), (2, 3), (3, 0))


@pytest.mark.parametrize(
    "kind",
    [
        CollectiveKind("all-reduce", HALVES),
        CollectiveKind("all-gather"),
        CollectiveKind("all-gather", HALVES),
        CollectiveKind("reduce-scatter"),
        CollectiveKind("all-to-all", HALVES),
        CollectiveKind("collective-permute", RING),
    ],
    ids=str,
)
def test_every_kind_has_a_chain_of_its_own(kind: CollectiveKind) -> None:
    """A chain whose collectives XLA merged or left out would be refused."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    on_four = jax.jit(lambda x: x.sum(), in_shardings=NamedSharding(mesh, PartitionSpec("data")))

    def look(request: CompileRequest) -> list[int]:
        chains = [Chain.AFTER_WORK, Chain.WORK_ALONE] if kind.opcode == "reduce-scatter" else [Chain.TIGHT]
        return [collective_runner(request, 4096, kind=kind, repeats=3, chain=one).run() for one in chains]

    found = intercept(on_four, (jax.ShapeDtypeStruct((8,), np.float32),), look, devices=4)
    assert min(found) > 0


def test_groups_that_leave_devices_out_cannot_be_swept() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    on_four = jax.jit(lambda x: x.sum(), in_shardings=NamedSharding(mesh, PartitionSpec("data")))

    def look(request: CompileRequest) -> None:
        collective_runner(request, 4096, kind=CollectiveKind("all-gather", ((0, 1), (2,))))

    with pytest.raises(UnsupportedError, match="expected groups of one size that hold each of 4 devices"):
        intercept(on_four, (jax.ShapeDtypeStruct((8,), np.float32),), look, devices=4)


def test_an_unknown_element_type_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="element type 'f33': expected one of bf16"):
        jax_dtype("f33")


def test_a_guard_that_the_user_set_on_all_threads_is_not_on_a_clean_one() -> None:
    before = jax.config.jax_transfer_guard
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        made = in_clean_thread(lambda: jax.numpy.ones(3))
    finally:
        jax.config.update("jax_transfer_guard", before)
    np.testing.assert_array_equal(made, [1, 1, 1])
