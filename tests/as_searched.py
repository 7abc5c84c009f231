"""Plans as the search left them."""

from __future__ import annotations

import msgspec

from disco_hlo.plan.plan import SEARCHED, Plan, Searched


def without_measurements(plan: Plan) -> Plan:
    """The plan as the search left it, before a clock chose among the finalists.

    Equal for equal inputs and seed, unless the search ran out of wall time or was interrupted. Times,
    the choice that followed from them and the notes on both are left out.
    """
    own = plan.searched or Searched(plan.strategies, plan.module_sha256, plan.structure)
    return msgspec.structs.replace(
        plan,
        strategies=own.strategies,
        module_sha256=own.module_sha256,
        chosen=SEARCHED,
        notes=(),
        measured=None,
        searched=None,
        structure=own.structure,
    )
