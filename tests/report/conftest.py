"""Plan folders, made once for all tests that only look at them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report import plans


@pytest.fixture(scope="session")
def h200_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan folder of the H200 step, with a profile beside it."""
    return plans.save_plan(
        tmp_path_factory.mktemp("h200"),
        plans.h200(),
        plans.h200_module(),
        plans.early_all_reduces(plans.h200()),
        profile=plans.sockets_profile(),
    )


@pytest.fixture(scope="session")
def cpu_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan folder of a small step compiled here."""
    from tests.steps.strategies import random_strategy

    source = plans.cpu()
    return plans.save_plan(
        tmp_path_factory.mktemp("cpu"), source, plans.cpu_module(), random_strategy(source, seed=3)
    )
