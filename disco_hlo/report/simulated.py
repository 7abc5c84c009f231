"""A plan and XLA's own on the simulator, region by region."""

from __future__ import annotations

from dataclasses import dataclass

from disco_hlo.hlo.regions import ENTRY
from disco_hlo.optimize.costs import Costs
from disco_hlo.optimize.regions import Predicted, StepTimes, step_times
from disco_hlo.report.bundle import Bundle
from disco_hlo.report.regions import RegionFacts, region_facts, side_by_side


@dataclass(frozen=True, eq=False)
class Simulated:
    """The steps under both; None where the module is missing, and XLA's where the plan's ops are not its."""

    plan: StepTimes | None
    default: StepTimes | None

    def of_region(self, name: str) -> tuple[Predicted | None, Predicted | None]:
        """One execution of a region, under the plan and under XLA's own."""
        plan, default = (
            None if times is None else times.predicted[name] for times in (self.plan, self.default)
        )
        return plan, default

    def rows(self, bundle: Bundle) -> list[RegionFacts]:
        """The table of the regions."""
        if bundle.source is None or self.plan is None:
            return []
        planned = (ENTRY, *(name for name, _ in bundle.plan.strategy.regions))
        ours = region_facts(bundle.source, self.plan, planned)
        return ours if self.default is None else side_by_side(region_facts(bundle.source, self.default), ours)


def simulated(bundle: Bundle, costs: Costs | None) -> Simulated:
    """Both steps of a bundle.

    Raises:
        DiscoError: the costs do not fit the module.
    """
    if bundle.source is None or costs is None:
        return Simulated(None, None)
    plan = step_times(bundle.source, bundle.strategy, costs)
    if bundle.default is None:
        return Simulated(plan, None)
    return Simulated(plan, step_times(bundle.source, bundle.default, costs, as_compiled=True))
