"""What a plan directory remembers of comparisons, and what it does not believe."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from disco_hlo.errors import PlanError
from disco_hlo.plan import store
from disco_hlo.plan.plan import Candidate
from disco_hlo.plan.store import PlanSlot, PlanStore, note_compared, was_compared, was_measured
from tests.plan.test_plan import small_plan

NOW = {"jax": "0.12.0", "jaxlib": "0.12.0", "disco_hlo": "1"}
MODULE, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def slot(tmp_path: Path) -> PlanSlot:
    made = PlanStore(tmp_path).slot("0" * 16, "cpu", "cpu", 2)
    made.path.mkdir(parents=True)
    return made


def test_what_was_compared_is_known_under_the_same_software_alone(slot: PlanSlot) -> None:
    assert not was_compared(slot, MODULE, NOW)
    note_compared(slot, MODULE, NOW)
    note_compared(slot, MODULE, NOW)
    assert was_compared(slot, MODULE, NOW)
    assert not was_compared(slot, OTHER, NOW)
    assert not was_compared(slot, MODULE, NOW | {"jaxlib": "0.12.1"})
    note_compared(slot, OTHER, NOW)
    assert was_compared(slot, MODULE, NOW)
    assert was_compared(slot, OTHER, NOW)
    assert len(store.compared_modules(slot.read_compared())) == 2


def test_the_oldest_of_many_are_forgotten(slot: PlanSlot) -> None:
    for number in range(70):
        note_compared(slot, f"{number:064x}", NOW)
    assert not was_compared(slot, f"{5:064x}", NOW)
    assert was_compared(slot, f"{6:064x}", NOW)
    assert was_compared(slot, f"{69:064x}", NOW)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{", b"\xff", b"[" * 100_000,
        b'{"format": "disco-hlo compared", "version": 2, "entries": []}',
        b'{"format": "disco-hlo compared", "version": 1, "entries": [{"module_sha256": "x", "versions": {}}]}',
        b'{"format": "disco-hlo compared", "version": 1, "entries": [], "more": 1}',
    ],
)  # fmt: skip
def test_a_damaged_record_says_nothing_and_is_replaced(text: bytes, slot: PlanSlot) -> None:
    (slot.path / "compared.json").write_bytes(text)
    assert not was_compared(slot, MODULE, NOW)
    note_compared(slot, MODULE, NOW)
    assert was_compared(slot, MODULE, NOW)


def test_a_record_that_is_a_link_or_too_large_is_not_read(slot: PlanSlot, tmp_path: Path) -> None:
    record = slot.path / "compared.json"
    note_compared(slot, MODULE, NOW)
    record.rename(tmp_path / "elsewhere.json")
    record.symlink_to(tmp_path / "elsewhere.json")
    assert not was_compared(slot, MODULE, NOW)
    record.unlink()
    record.write_bytes(b" " * ((1 << 20) + 1))
    assert not was_compared(slot, MODULE, NOW)
    with pytest.raises(PlanError):
        note_compared(slot, MODULE, NOW)


def test_a_plan_was_measured_where_its_own_module_ran_under_this_software() -> None:
    plan = msgspec.structs.replace(small_plan(), versions=NOW)
    assert plan.measured is not None
    assert was_measured(plan, plan.module_sha256, NOW)
    assert not was_measured(plan, "c" * 64, NOW)
    assert not was_measured(plan, plan.module_sha256, NOW | {"jax": "0.12.1"})
    assert not was_measured(msgspec.structs.replace(plan, measured=None), plan.module_sha256, NOW)
    assert not was_measured(msgspec.structs.replace(plan, chosen="another"), plan.module_sha256, NOW)
    timed = tuple(msgspec.structs.replace(one, only_timed=True) for one in plan.measured.candidates)
    only_timed = msgspec.structs.replace(plan.measured, candidates=timed)
    assert not was_measured(msgspec.structs.replace(plan, measured=only_timed), plan.module_sha256, NOW)
    unmeasured = msgspec.structs.replace(plan.measured, candidates=(Candidate("plan", 1, 0, 0, 0),))
    assert not was_measured(msgspec.structs.replace(plan, measured=unmeasured), plan.module_sha256, NOW)
