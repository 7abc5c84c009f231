"""What a search finds for steps whose values share memory computes the same numbers."""

from __future__ import annotations

import pytest

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.read import read
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.run import search
from tests.machines import CPU
from tests.plan.test_storage_steps import assert_same_numbers, intercepted
from tests.search.cost_models import HashedCosts
from tests.steps.storage_steps import variants

FORMS = dict(variants())


@pytest.mark.parametrize("name", FORMS)
def test_what_a_search_finds_computes_what_xla_does(name: str) -> None:
    """Costs that make no sense lead it to kernels that nobody would choose. Five searches, all finalists."""

    def body(request: CompileRequest) -> None:
        source = canonicalize(compiles.capture(request))
        start, found = read(source), {}
        for seed in range(5):
            settings = SearchSettings(seed=seed, seeds=1, evaluations=300, processes=1, finalists=2)
            result = search(source.graph, HashedCosts(), CPU, start=start, settings=settings)
            found |= {
                f"search {seed}, {place}": finalist.strategy
                for place, finalist in enumerate(result.finalists)
            }
        assert found
        assert_same_numbers(request, source, FORMS[name], found)

    intercepted(FORMS[name], body)
