"""All-reduces of one size, compiled to be timed."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.measuring.inputs.made_up import synthetic_values
from disco_hlo.plugin.measuring.links import collective_runner
from disco_hlo.plugin.measuring.runner import Outputs
from disco_hlo.plugin.xla.clean_thread import in_clean_thread
from disco_hlo.plugin.xla.dtypes import jax_dtype
from disco_hlo.plugin.xla.executables import Parameter
from disco_hlo.plugin.xla.jaxlink import CompileRequest
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
