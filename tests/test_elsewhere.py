"""A function called in a fresh interpreter: what it returns and raises comes back, and its end is told."""

import os

import pytest

from disco_hlo.elsewhere import elsewhere, here
from disco_hlo.errors import DiscoError, ModuleError
from disco_hlo.hlo.canonical import canonicalize


def test_what_a_function_returns_comes_from_another_process() -> None:
    assert elsewhere(os.getpid) != here(os.getpid) == os.getpid()
    assert elsewhere(divmod, 7, 2) == (3, 1)
    assert elsewhere(int, "11", base=2) == 3


def test_what_a_function_refuses_is_refused_here() -> None:
    with pytest.raises(ModuleError) as there:
        elsewhere(canonicalize, b"no module")
    with pytest.raises(ModuleError) as refused:
        canonicalize(b"no module")
    assert str(there.value) == str(refused.value)


def test_an_interpreter_that_dies_is_an_error_with_its_last_words() -> None:
    with pytest.raises(DiscoError, match="started for divmod ended early: ZeroDivisionError"):
        elsewhere(divmod, 1, 0)
    with pytest.raises(DiscoError, match="started for _exit ended early: exit status 7"):
        elsewhere(os._exit, 7)


def test_what_no_other_interpreter_can_be_told_is_called_here() -> None:
    local = []
    elsewhere(lambda: local.append("called"))
    assert local == ["called"]
