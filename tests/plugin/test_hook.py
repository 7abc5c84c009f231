"""What the hook does with modules of our own compiles, and that it leaves all others alone."""

from __future__ import annotations

import contextlib
import re
import threading
import time

import pytest

from disco_hlo.hlo import proto
from disco_hlo.plugin.xla import hook
from disco_hlo.plugin.xla.hook import OwnCompile

STEP = b"\x0a\x08jit_step" + b"\x28\x96\x01" + b"\x30\x07"  # name, id 150, entry_computation_id 7


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (STEP, "jit_step"),
        (b"\x0a\x96\x01" + b"a" * 150 + b"\x28\x01", "a" * 150),
        (b"", ""),
        (b"\x30\x07", ""),
    ],
    ids=["short", "long", "empty", "without a name"],
)
def test_the_name_of_a_module_is_in_its_first_field(module: bytes, name: str) -> None:
    assert hook.module_name(module) == name


FIELDS = b"\x0a\x01m" + b"\x21" + bytes(8) + b"\x2d\x01\x02\x03\x04" + b"\x1a\x02\x28\x05"
"""Of every wire type."""


@pytest.mark.parametrize(
    ("module", "left"),
    [
        (STEP, b"\x0a\x08jit_step\x30\x07"),
        (b"\x0a\x08jit_step\x30\x07", b"\x0a\x08jit_step\x30\x07"),
        (FIELDS + b"\x28\x05\x30\x07", FIELDS + b"\x30\x07"),
    ],
    ids=["with one", "without", "behind other fields"],
)
def test_the_running_number_of_a_module_is_left_out(module: bytes, left: bytes) -> None:
    assert hook.without_id(module) == left


def test_what_is_left_is_the_same_module() -> None:
    module = proto.parse(hook.without_id(STEP + b"\x1a\x02\x28\x07"))
    assert module.name == "jit_step"
    assert module.entry_computation_id == 7


def test_only_the_module_of_that_name_is_replaced() -> None:
    own = OwnCompile(lambda _: b"other")
    with hook.own_compile("jit_step", own) as name:
        assert name == "jit_step"
        assert hook.on_module(b"\x0a\x05jit_x") is None
        assert own.seen is None
        assert hook.on_module(STEP) == b"other"
        assert own.seen == STEP
    assert hook.on_module(STEP) is None


def test_compiles_of_one_module_at_once_are_told_apart() -> None:
    first, second = OwnCompile(lambda _: b"first"), OwnCompile(lambda _: b"second")
    with hook.own_compile("jit_step", first) as one, hook.own_compile("jit_step", second) as other:
        assert hook.on_module(hook.named(STEP, other)) == b"second"
        assert hook.on_module(hook.named(STEP, one)) == b"first"


def test_the_early_stage_replaces_the_module_under_the_name_it_is_compiled_under() -> None:
    own = OwnCompile(early=lambda _: hook.named(STEP, "jit_other"))
    with hook.own_compile("jit_step", own):
        assert hook.on_early_module(b"\x0a\x05jit_x") is None
        assert hook.on_early_module(STEP) == STEP
        assert own.seen_early == STEP
        assert own.seen is None
        assert hook.on_module(STEP) is None
    assert hook.on_early_module(STEP) is None


def test_ours_goes_by_another_name_beside_an_ordinary_compile() -> None:
    own = OwnCompile(lambda _: b"other")
    with hook.ordinary_compile("jit_step"), hook.own_compile("jit_step", own) as name:
        assert hook.on_module(STEP) is None
        assert hook.on_module(hook.named(STEP, name)) == b"other"


def test_an_ordinary_compile_waits_for_ours_of_the_same_name() -> None:
    order: list[str] = []
    entered = threading.Event()

    def ordinary() -> None:
        entered.set()
        with hook.ordinary_compile("jit_step"):
            order.append("ordinary")

    thread = threading.Thread(target=ordinary)
    with hook.own_compile("jit_step", OwnCompile()):
        thread.start()
        entered.wait()
        with hook.ordinary_compile("jit_other"):
            order.append("other")
        thread.join(0.05)
        order.append("ours")
    thread.join()
    assert order == ["other", "ours", "ordinary"]


def test_an_ordinary_compile_that_waits_is_not_overtaken() -> None:
    """XLA's default is compiled beside structures: each took the name that the one before it had left."""

    def ordinary() -> None:
        with hook.ordinary_compile("jit_step"):
            pass

    thread = threading.Thread(target=ordinary)
    with contextlib.ExitStack() as first:
        first.enter_context(hook.own_compile("jit_step", OwnCompile()))
        thread.start()
        while not hook._gate._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)
        with hook._gate:
            first.close()
            with hook.own_compile("jit_step", OwnCompile()) as name:
                assert name != "jit_step"
    thread.join()


def test_one_of_ours_that_does_not_come_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_LONGEST_S", 0.01)
    with hook.own_compile("jit_step", OwnCompile(lambda _: b"other")):
        with hook.ordinary_compile("jit_step"):
            assert hook.on_module(STEP) is None
        assert hook.on_module(STEP) is None
    assert hook.on_module(STEP) is None


def test_beside_a_training_no_ordinary_compile_waits_for_ours() -> None:
    with hook.own_compile("jit_step", OwnCompile(lambda _: b"other"), apart=True) as name:
        with hook.ordinary_compile("jit_step"):
            assert hook.on_module(STEP) is None
        assert hook.on_module(hook.named(STEP, name)) == b"other"


@pytest.mark.parametrize("name", ["jit_step", "x", "n" * 150, "n" * 20_000])
def test_a_module_can_be_given_another_name(name: str) -> None:
    renamed = hook.named(STEP, name)
    assert hook.module_name(renamed) == name
    assert hook.named(renamed, "jit_step") == STEP


def test_a_name_that_xla_would_change_is_changed_before() -> None:
    own = OwnCompile()
    with hook.own_compile("jit_шаг", own) as name:
        assert re.fullmatch(r"jit____+disco_\d+", name)
        assert hook.on_module(hook.named(STEP, name)) is None
    assert own.seen == hook.named(STEP, name)
