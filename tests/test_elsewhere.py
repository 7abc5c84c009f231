"""A function called in a fresh interpreter: what it returns and raises comes back, or it is called here."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_hlo.elsewhere import apart, command, elsewhere, environment, here
from disco_hlo.errors import CircleError, DiscoError, ModuleError
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


def test_what_is_no_error_of_ours_or_has_fields_of_its_own_comes_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        elsewhere(divmod, 1, 0)
    with pytest.raises(CircleError) as refused:
        elsewhere(raises_circle)
    assert refused.value.tokens == ("g1", "g2")


def raises_circle() -> None:
    raise CircleError("in a circle", ("g1", "g2"))


def dies_elsewhere(own: int) -> int:
    if os.getpid() != own:
        os.kill(os.getpid(), signal.SIGKILL)
    return own


def test_what_an_interpreter_that_is_killed_did_not_answer_is_called_here() -> None:
    assert elsewhere(dies_elsewhere, os.getpid()) == os.getpid()


def test_an_interpreter_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    started, over = tmp_path / "started", tmp_path / "over"
    parent = subprocess.Popen([sys.executable, "-c", _WAITS, str(started), str(over)])
    until(started.exists)
    parent.kill()
    parent.wait()
    pid = int(started.read_text())
    until(lambda: not is_alive(pid))
    assert not over.exists()


_WAITS = """
import pathlib, sys
from disco_hlo.elsewhere import elsewhere
from tests.test_elsewhere import waits
elsewhere(waits, *sys.argv[1:])
"""


def waits(started: str, over: str) -> None:
    Path(started + ".new").write_text(str(os.getpid()))
    os.replace(started + ".new", started)
    time.sleep(30)
    Path(over).touch()


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Not a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_no_other_interpreter_can_be_told_is_called_here() -> None:
    local = []
    elsewhere(lambda: local.append("called"))
    assert local == ["called"]


def test_apart_from_a_training_a_function_has_no_devices_and_comes_last() -> None:
    def called(function: Callable[..., object], *arguments: object) -> object:
        return apart(function, *arguments, longest_s=60, stop=lambda: False)

    assert called(os.getenv, "CUDA_VISIBLE_DEVICES") == ""
    assert called(os.nice, 0) == os.nice(0) + 10
    with pytest.raises(ModuleError):
        called(canonicalize, b"no module")
    with pytest.raises(DiscoError, match="not readable"):
        called(raises_circle)
    with pytest.raises(DiscoError, match="ended with -9"):
        called(dies_elsewhere, os.getpid())


def test_what_lies_in_the_scripts_folder_is_not_taken_for_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder comes into a script's path when Python has its own ``types`` already."""
    (tmp_path / "types.py").write_text("raise SystemExit('of the script')")
    (tmp_path / "profile.py").write_text("raise SystemExit('of the script')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), tmp_path, "", *sys.path])
    done = subprocess.run(
        command("tests.test_elsewhere"), env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "of Python\n", "")
    assert apart(divmod, 7, 2, longest_s=60, stop=lambda: False) == (3, 1)


def main() -> None:
    import profile

    print("of Python" if hasattr(profile, "Profile") else "of the script")


def test_what_fails_there_is_one_line_here_also_where_warnings_are_errors(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    assert apart(divmod, 7, 2, longest_s=60, stop=lambda: False) == (3, 1)
    with pytest.raises(DiscoError, match="process failed: ZeroDivisionError: "):
        apart(divmod, 1, 0, longest_s=60, stop=lambda: False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("longest_s", "over", "why"), [(60.0, True, "search was stopped"), (0.0, False, "after 0 s")]
)
def test_apart_from_a_training_nothing_goes_on_for_longer_than_it_may(
    longest_s: float, over: bool, why: str
) -> None:
    with pytest.raises(DiscoError, match=why):
        apart(time.sleep, 1000.0, longest_s=longest_s, stop=lambda: over)
