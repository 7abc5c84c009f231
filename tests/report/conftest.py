"""Plan folders, made once for all tests that only look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disco_hlo.report.page import render
from tests.captured import captured, stored
from tests.report import plans


@pytest.fixture(scope="session")
def h200_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan folder of the H200 step, with a profile beside it."""
    return plans.save_plan(
        tmp_path_factory.mktemp("h200"),
        plans.h200(),
        plans.h200_module(),
        plans.early_collectives(plans.h200()),
        profile=plans.sockets_profile(),
    )


@pytest.fixture(scope="session")
def h200_content(h200_plan: Path) -> dict[str, Any]:
    """What the page of that plan shows; not to be changed."""
    return plans.content(h200_plan / "plan.json")


@pytest.fixture(scope="session")
def h200_page(h200_content: dict[str, Any]) -> bytes:
    """The page itself."""
    return render(h200_content)


@pytest.fixture(scope="session")
def vgg19_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan folder of a smaller GPU step, with that profile beside it."""
    source = captured("h200_models/vgg19")
    return plans.save_plan(
        tmp_path_factory.mktemp("vgg19"),
        source,
        stored("h200_models/vgg19"),
        plans.early_collectives(source),
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
