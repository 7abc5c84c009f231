"""What the user may set, and the lines that a user sees."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disco_hlo.plugin import logs
from disco_hlo.plugin.settings import Settings, SettingsError


def asked(**environment: str) -> Settings:
    """Those of an environment that says to search."""
    return Settings.from_environment({"ENABLE_SEARCH": "1"} | environment)


def test_defaults_suit_a_first_run() -> None:
    settings = asked(XDG_CACHE_HOME="/caches")
    assert settings == Settings(
        search=True, directory=Path("/caches/disco-hlo"), log_level="info", module=None, budget_s=120.0, seed=0,
        finalists=5, patience=1000, timeout_s=600.0, channel="auto",
    )  # fmt: skip


def test_without_a_cache_directory_plans_are_kept_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    settings = Settings.from_environment({"ENABLE_SEARCH": "0"})
    assert settings.directory == Path("/home/someone/.cache/disco-hlo")
    assert settings.search is False


def test_a_relative_directory_stays_where_it_is_when_the_script_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = asked(DISCO_DIR="my plans")
    assert settings.directory == tmp_path / "my plans"


def test_a_home_that_nobody_knows_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    with pytest.raises(SettingsError, match="DISCO_DIR is '~them/plans'; expected a directory"):
        asked(DISCO_DIR="~them/plans")
    with pytest.raises(SettingsError, match="nobody says where this user's home folder is; set DISCO_DIR"):
        asked()


def test_a_folder_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SettingsError, match="DISCO_DIR is 'plans'; expected a directory"):
        asked(DISCO_DIR="plans")


def test_every_setting_can_be_set_in_the_environment() -> None:
    settings = asked(
        ENABLE_SEARCH=" 1 ", DISCO_DIR="/plans", DISCO_LOG="DEBUG", DISCO_MODULE="train", DISCO_BUDGET_S="2.5",
        DISCO_SEED="7", DISCO_FINALISTS="2", DISCO_PATIENCE="50", DISCO_TIMEOUT_S="30", DISCO_CHANNEL="mpi",
        DISCO_STRUCTURE="chunk-2", DISCO_WHEN="training", DISCO_SHARE="0.5",
    )  # fmt: skip
    assert settings == Settings(
        True, Path("/plans"), "debug", "train", 2.5, 7,
        finalists=2, patience=50, timeout_s=30.0, channel="mpi", structure="chunk-2", when="training", share=0.5,
    )  # fmt: skip


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "disco.toml"
    file.write_text('dir = "/from/file"\nbudget_s = 1.5\nfinalists = 4\n')
    settings = asked(DISCO_CONFIG=str(file), DISCO_BUDGET_S="1.25")
    assert (settings.directory, settings.budget_s, settings.finalists) == (Path("/from/file"), 1.25, 4)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("ENABLE_SEARCH", "yes", "expected 1 (search) or 0 (enact)"),
        ("ENABLE_SEARCH", "", "expected 1 (search) or 0 (enact)"),
        ("DISCO_LOG", "loud", "expected one of debug, info, warning, error"),
        ("DISCO_BUDGET_S", "0", "expected a number of seconds above 0"),
        ("DISCO_BUDGET_S", "nan", "expected a number of seconds above 0"),
        ("DISCO_BUDGET_S", "inf", "expected a number of seconds above 0"),
        ("DISCO_PATIENCE", "2.5", "expected a whole number, 1 or more"),
        ("DISCO_SEED", "-1", "expected a whole number, 0 or more"),
        ("DISCO_STRUCTURE", "chunk;2", "expected auto, off, or the name of a schedule"),
        ("DISCO_FINALISTS", "101", "expected a whole number from 1 to 100"),
        ("DISCO_PATIENCE", "0", "expected a whole number, 1 or more"),
        ("DISCO_TIMEOUT_S", "-3", "expected a number of seconds above 0"),
        ("DISCO_CHANNEL", "smoke", "expected one of auto, mpi, kv"),
        ("DISCO_WHEN", "later", "expected one of auto, compile, training"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(variable: str, value: str, expected: str) -> None:
    with pytest.raises(SettingsError) as error:
        asked(**{variable: value})
    assert str(error.value) == f"{variable} is {value!r}; {expected}"


@pytest.mark.parametrize(("text", "share"), [(".6", 0.6), ("1.", 1.0), ("+5e-1", 0.5)])
def test_a_number_may_be_written_as_python_reads_it(text: str, share: float) -> None:
    assert asked(DISCO_SHARE=text).share == share


def test_a_misspelled_variable_is_named_and_other_programs_variables_are_not() -> None:
    with pytest.raises(SettingsError, match="DISCO_BUDGT_S is no setting; did you mean DISCO_BUDGET_S"):
        asked(DISCO_BUDGT_S="3")
    theirs = {"DISCO_HOME": "/disco", "DISCO_PORT": "80", "DISCO_LEVEL": "3"}
    assert asked(**theirs) == asked()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alpha = 1.1", "unknown key 'alpha'; expected one of budget_s, channel"),
        ("budget_s = true", "budget_s is True; expected a number of seconds above 0"),
        ("seed = [1]", "seed is [1]; expected a whole number, 0 or more"),
        ("patience = 2.5", "patience is 2.5; expected a whole number, 1 or more"),
        ("seed = ", "DISCO_CONFIG: cannot read"),
    ],
)
def test_a_bad_file_is_named_with_what_was_expected(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "disco.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as error:
        asked(DISCO_CONFIG=str(file))
    assert str(file) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "can't decode"),
        (b"seed = " + b"[" * 50_000, "something in it is nested too deep"),
        (b"seed = " + b"9" * 5_000, "a number in it has thousands of digits"),
    ],
    ids=["none", "text", "deep", "long"],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, why: str, tmp_path: Path) -> None:
    file = tmp_path / "disco.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=f"DISCO_CONFIG: cannot read {file}: .*{why}"):
        asked(DISCO_CONFIG=str(file))


@pytest.mark.parametrize(
    ("wanted", "module", "named"),
    [
        ("step", "jit_step", True),
        ("step", "pmap_step", True),
        ("jit_step", "jit_step", True),
        ("step", "jit_step_2", False),
        ("jit_step", "step", False),
        (None, "jit_step", False),
    ],
)
def test_a_module_is_named_with_or_without_jits_prefix(wanted: str | None, module: str, named: bool) -> None:
    assert Settings(search=True, directory=Path("/plans"), module=wanted).names(module) is named


def test_only_a_name_forces_a_schedule() -> None:
    names = ["chunk-2", "matmul, all-reduce, fused pointwise"]
    forced = [asked(DISCO_STRUCTURE=text).forced_structure for text in ("", "auto", "off", *names)]
    assert forced == [None, None, None, *names]


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[None]:
    before = (logs.LOGGER.level, logs.LOGGER.propagate, list(logs.LOGGER.handlers))
    yield
    logs.LOGGER.level, logs.LOGGER.propagate, logs.LOGGER.handlers = before
    logs.LOGGER.setLevel(before[0])


def test_a_phase_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    logs.configure("info")
    logs.LOGGER.info("profiled %d instructions\nin %.1f s", 12, 3.14)
    logs.LOGGER.warning("the plan is \x1bold")
    logs.LOGGER.debug("not shown")
    captured = capsys.readouterr()
    assert captured.err == "disco: profiled 12 instructions in 3.1 s\ndisco: warning: the plan is \\x1bold\n"
    assert captured.out == ""


def test_a_traceback_is_shown_only_for_debugging(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        try:
            raise ValueError("broken")
        except ValueError as error:
            logs.LOGGER.error("gave up: %s", error, exc_info=True)

    logs.configure("info")
    fail()
    assert capsys.readouterr().err == "disco: error: gave up: broken\n"
    logs.configure("debug")
    fail()
    assert "Traceback (most recent call last)" in capsys.readouterr().err


class Closed:
    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file")

    def isatty(self) -> bool:
        raise ValueError("I/O operation on closed file")


class Half:
    """As scripts put in the place of stderr: what is not called in their own tests is not there."""

    def write(self, text: str) -> int:
        return len(text)


@pytest.mark.parametrize("stream", [None, Closed(), Half()], ids=["none", "closed", "half"])
def test_a_stderr_that_takes_no_line_does_not_stop_the_training(
    stream: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.configure("info")
    monkeypatch.setattr(sys, "stderr", stream)
    logs.LOGGER.info("nobody reads this")
    assert logs.progress_wanted() is False


def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.configure("info")
    assert logs.progress_wanted() is False
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert logs.progress_wanted() is True
    logs.configure("warning")
    assert logs.progress_wanted() is False


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (0.8, "1.25x faster"),
        (0.989, "1.01x faster"),
        # A plan that was taken whatever the clock said was announced as 1.00x faster.
        (0.995, "no faster"),
        (1.005, "no faster"),
        (1.1, "1.10x slower"),
    ],
)
def test_how_two_times_compare(ratio: float, said: str) -> None:
    assert logs.compared(ratio) == said
