"""With ``ENABLE_SEARCH`` unset the package might as well not be installed."""

from __future__ import annotations

from collections.abc import Callable

from tests.e2e.executed import digest
from tests.e2e.jobs import Job


def test_unset_the_run_is_that_of_a_machine_without_the_package(fresh: Callable[..., Job]) -> None:
    # Told so, it has a Python of its own, as the other has.
    default = fresh().train(JAX_PLATFORMS="cpu")
    absent = fresh().train(fault="not_installed")
    assert not [name for name in absent.imported if name.startswith("disco_hlo")]
    assert digest(default) == digest(absent)
    assert default.losses == absent.losses
    assert default.imported - absent.imported == {"disco_hlo", "disco_hlo.plugin"}
    assert default.log == []
