"""What a fused kernel refuses, in one line each: XLA's own kernels take over there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from disco_hlo.errors import UnsupportedError

OLDEST_JAX = (0, 11, 2)
HOPPER = "9.0"
MOST_DEVICES = 8


class KernelRefusedError(UnsupportedError):
    """A fused kernel does not take these arrays, tiles or devices."""


def require(met: bool, kernel: str, what: str) -> None:
    """Refuse, unless `met`.

    Raises:
        KernelRefusedError: with the kernel's name and `what`: what was expected and what came.
    """
    if not met:
        raise KernelRefusedError(f"{kernel}: {what}; XLA's separate kernels can do it")


def devices_along(axis_name: str, kernel: str) -> int:
    """How many devices work together along `axis_name`. Devices that are no GPUs pass: XLA refuses those itself.

    Raises:
        KernelRefusedError: an older jax, several processes, another GPU than Hopper, a mesh of several axes, or not
            two to eight devices.
    """
    require(
        jax.__version_info__ >= OLDEST_JAX,
        kernel,
        f"needs jax {'.'.join(map(str, OLDEST_JAX))} or newer, this is {jax.__version__}",
    )
    processes = jax.process_count()
    require(processes == 1, kernel, f"all GPUs must belong to one process, these belong to {processes}")
    capability = getattr(jax.devices()[0], "compute_capability", HOPPER)
    require(
        capability == HOPPER, kernel, f"needs a GPU of compute capability {HOPPER}, this one has {capability}"
    )
    count: int = lax.axis_size(axis_name)
    require(
        2 <= count <= MOST_DEVICES,
        kernel,
        f"works with 2 to {MOST_DEVICES} devices, axis {axis_name!r} has {count}",
    )
    size = jax.sharding.get_abstract_mesh().size
    require(
        size == count,
        kernel,
        f"axis {axis_name!r} of {count} devices must be the only one of a mesh of {size}",
    )
    return count


def multiple(kernel: str, name: str, size: int, of: int, what: str) -> None:
    """Refuse a size that is not a multiple of what a tile or the devices divide it by.

    Raises:
        KernelRefusedError: it is not.
    """
    require(size > 0 and size % of == 0, kernel, f"{name} = {size} must be a multiple of {of} ({what})")


def one_dtype(kernel: str, arrays: dict[str, jax.Array], allowed: tuple[jnp.dtype, ...]) -> None:
    """Refuse arrays of different dtypes, or of another than the allowed.

    Raises:
        KernelRefusedError: they are.
    """
    names = " or ".join(dtype.name for dtype in allowed)
    came = ", ".join(f"{name} {array.dtype.name}" for name, array in arrays.items())
    (first, *_) = arrays.values()
    met = first.dtype in allowed and all(array.dtype == first.dtype for array in arrays.values())
    require(met, kernel, f"all arrays must be {names}, got {came}")
