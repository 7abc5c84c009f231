"""What the autotuner picked: beside the plans, from rank 0 to all when a job starts, from all to all after a search.

Ranks are threads here, each with a plan directory of its own, as on hosts that share no file system.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from disco_hlo.activation.kvstore import KvChannel
from disco_hlo.plugin import tuner_results
from disco_hlo.plugin.tuner_results import exchange, folder_of, hand_out, is_tuned, note_tuned
from disco_hlo.plugin.xla import jaxlink
from tests.activation.stores import MemoryStore, on_ranks
from tests.plugin.sessions import fake_session

DEVICE = "f0f061abbc1249ce"
MATMUL, CONVOLUTION = f"{DEVICE}/0c185d2813d1.pb", f"{DEVICE}/8b0144968e12.pb"


@pytest.fixture(autouse=True)
def as_in_a_fresh_process() -> Iterator[None]:
    tuner_results._own_folder.cache_clear()
    tuner_results._handed_out.clear()
    yield
    tuner_results._own_folder.cache_clear()
    tuner_results._handed_out.clear()


def keep(directory: Path, **picks: bytes) -> Path:
    """A plan directory's folder with these picks in it."""
    folder = tuner_results._own_folder(directory)
    assert folder is not None
    names = {"matmul": MATMUL, "convolution": CONVOLUTION}
    for name, data in picks.items():
        path = folder / names[name]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return folder


def content(folder: Path | None) -> dict[str, bytes]:
    assert folder is not None
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def on(platform: str, processes: tuple[int, ...] = (0,)) -> Any:
    backend = SimpleNamespace(platform=platform, process_index=lambda: 0)
    return SimpleNamespace(backend=backend, process_indices=processes)


def test_it_lies_beside_the_plans(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(on("gpu"), tmp_path / "plans", 1.0)
    assert folder is not None
    assert folder.relative_to(tmp_path).parts[:2] == ("plans", "autotune")
    assert folder.is_dir()
    assert folder_of(on("cpu"), tmp_path / "other", 1.0) is None
    assert not (tmp_path / "other").exists()
    (tmp_path / "file").touch()
    for _ in range(2):
        assert folder_of(on("gpu"), tmp_path / "file", 1.0) is None
    (line,) = caplog.messages
    assert line.startswith("what XLA's autotuner picks is not kept, the next start may have no plan: ")


def test_ranks_with_empty_directories_get_what_rank_0_has(tmp_path: Path) -> None:
    keep(tmp_path / "0", matmul=b"library", convolution=b"engine 4")
    folders = on_ranks(3, lambda one: hand_out(one, tmp_path / str(one.rank), 20.0))
    assert [folder.relative_to(tmp_path).parts[0] for folder in folders] == ["0", "1", "2"]
    for folder in folders:
        assert content(folder) == {MATMUL: b"library", CONVOLUTION: b"engine 4"}


def test_what_rank_0_picked_comes_in_the_place_of_what_another_rank_picked(tmp_path: Path) -> None:
    keep(tmp_path / "0", matmul=b"library")
    keep(tmp_path / "1", matmul=b"Triton", convolution=b"engine 1")
    folders = on_ranks(2, lambda one: hand_out(one, tmp_path / str(one.rank), 20.0))
    assert content(folders[0]) == {MATMUL: b"library"}
    assert content(folders[1]) == {MATMUL: b"library", CONVOLUTION: b"engine 1"}


def test_a_rank_that_cannot_write_its_directory_has_a_folder_for_itself(tmp_path: Path) -> None:
    keep(tmp_path / "0", matmul=b"library")
    (tmp_path / "1").touch()
    own, alone = on_ranks(2, lambda one: hand_out(one, tmp_path / str(one.rank), 20.0))
    assert content(alone) == content(own) == {MATMUL: b"library"}
    assert tmp_path not in alone.parents


def test_a_fork_of_the_training_leaves_its_folder(tmp_path: Path) -> None:
    tuner_results._remove(tmp_path, os.getpid() + 1)
    assert tmp_path.exists()
    tuner_results._remove(tmp_path, os.getpid())
    assert not tmp_path.exists()


def test_a_directory_that_takes_nothing_new_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = keep(tmp_path / "1", convolution=b"engine 1")
    write = tuner_results.replace_files

    def read_only(folder: Path, files: dict[str, bytes]) -> None:
        if full in folder.parents:
            raise OSError(30, "Read-only file system")
        write(folder, files)

    monkeypatch.setattr(tuner_results, "replace_files", read_only)
    keep(tmp_path / "0", matmul=b"library")
    _, alone = on_ranks(2, lambda one: hand_out(one, tmp_path / str(one.rank), 20.0))
    assert content(alone) == {MATMUL: b"library", CONVOLUTION: b"engine 1"}
    assert content(full) == {CONVOLUTION: b"engine 1"}


def test_names_that_lead_elsewhere_are_not_written(tmp_path: Path) -> None:
    picks = {
        "../outside.pb": b"x",
        "/tmp/absolute.pb": b"x",
        "a/b/deep.pb": b"x",
        ".hidden.pb": b"x",
        MATMUL: b"y",
    }
    channel = SimpleNamespace(rank=1, broadcast=lambda *_, **__: msgspec.msgpack.encode(picks))
    folder = hand_out(channel, tmp_path / "plans", 1.0)  # type: ignore[arg-type]
    assert content(folder) == {MATMUL: b"y"}
    assert [path.name for path in tmp_path.iterdir()] == ["plans"]


def test_what_is_no_pick_is_not_sent(tmp_path: Path) -> None:
    folder = keep(tmp_path, matmul=b"library")
    (folder / "notes").write_text("mine")
    (folder / "link.pb").symlink_to("/etc/passwd")
    (folder / "large.pb").write_bytes(bytes(tuner_results._LARGEST_BYTES + 1))
    assert tuner_results._picks_in(folder) == {MATMUL: b"library"}


@pytest.mark.parametrize("question", ["rglob", "is_dir"])
def test_a_folder_that_cannot_be_looked_into_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, question: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Stale file handle")

    folders = [keep(tmp_path / rank, matmul=b"library") for rank in "01"]
    with monkeypatch.context() as patched:
        patched.setattr(Path, question, refuse)
        assert on_ranks(2, lambda one: hand_out(one, tmp_path / str(one.rank), 2.0)) == folders
    assert caplog.messages == []


def test_where_rank_0_is_silent_a_line_says_so_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    channel = KvChannel(1, 2, "job", MemoryStore())
    folder = hand_out(channel, tmp_path, 0.05)
    assert content(folder) == {}
    (line,) = caplog.messages
    assert line.startswith(
        "the results of rank 0's XLA autotuner did not arrive (autotune: rank 0 of 2 did not answer"
    )
    assert line.endswith(
        "): rank 1 tunes by itself, and may then compile another module, for which there is no plan"
    )


def test_what_arrives_and_cannot_be_read_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    channel = SimpleNamespace(rank=1, broadcast=lambda *_, **__: b"\xc1")
    assert content(hand_out(channel, tmp_path, 1.0)) == {}  # type: ignore[arg-type]
    assert "tunes by itself, and may then compile another module" in caplog.text


def test_only_the_first_request_of_all_processes_waits_for_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def handed(channel: KvChannel, directory: Path, timeout_s: float) -> Path:
        asked.append((channel.rank, channel.size, timeout_s))
        return directory

    monkeypatch.setattr(jaxlink, "distributed_job", lambda: jaxlink.DistributedJob(None, "host:1234", 1, 0))
    monkeypatch.setattr(jaxlink, "process_count", lambda: 2)
    monkeypatch.setattr(tuner_results, "hand_out", handed)
    assert folder_of(on("gpu"), tmp_path, 7.0) == tuner_results._own_folder(tmp_path)  # its own devices alone
    assert asked == []
    for _ in range(2):
        assert folder_of(on("gpu", (0, 1)), tmp_path, 7.0) == tmp_path
    assert asked == [(0, 2, 7.0)]


def session(channel: Any, folder: Path | None, backend: str = "gpu") -> Any:
    request, facts = SimpleNamespace(tuner_results=folder), SimpleNamespace(backend=backend)
    return fake_session(channel=channel, request=request, facts=facts, timeout_s=20.0)


def test_after_a_search_every_rank_has_what_all_picked(tmp_path: Path) -> None:
    folders: list[Path | None] = [
        keep(tmp_path / "0", matmul=b"library"),
        keep(tmp_path / "1", convolution=b"engine 4"),
        keep(tmp_path / "2", convolution=b"engine 1"),
        None,
    ]
    on_ranks(4, lambda one: exchange(session(one, folders[one.rank])))
    assert content(folders[0]) == {MATMUL: b"library", CONVOLUTION: b"engine 4"}
    assert content(folders[1]) == {MATMUL: b"library", CONVOLUTION: b"engine 4"}
    assert content(folders[2]) == {MATMUL: b"library", CONVOLUTION: b"engine 1"}


def test_other_ranks_hear_which_modules_have_all_their_picks(tmp_path: Path) -> None:
    folders = [keep(tmp_path / str(rank), matmul=b"library") for rank in range(2)]
    note_tuned(folders[1], "f00d")
    note_tuned(None, "f00d")
    on_ranks(2, lambda one: exchange(session(one, folders[one.rank])))
    assert [is_tuned(folder, "f00d") for folder in (*folders, None)] == [True, True, False]
    assert not is_tuned(folders[0], "beef")
    (tmp_path / "file").write_bytes(b"")
    note_tuned(tmp_path / "file", "f00d")  # which is no folder: it is tuned anew


def test_a_folder_that_cannot_be_looked_into_tells_of_no_module(tmp_path: Path) -> None:
    """An error here on one rank alone would leave the others waiting for its answer."""
    assert not is_tuned(tmp_path / ("too long a name" * 50), "f00d")


def test_that_what_others_picked_cannot_be_kept_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    folders = [keep(tmp_path / "0"), keep(tmp_path / "1", convolution=b"engine 4")]

    def full(_folder: Path, _files: dict[str, bytes]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuner_results, "replace_files", full)

    def step(one: KvChannel) -> None:
        mine = session(one, folders[one.rank])
        mine.say = lambda message, *values: said.append(message % values)
        exchange(mine)

    on_ranks(2, step)
    [line] = said
    assert line.startswith(
        "what XLA's autotuner picked on other ranks is not kept (OSError: [Errno 28] No space left"
    )


def test_what_all_have_is_not_sent(tmp_path: Path) -> None:
    folders = [keep(tmp_path / str(rank), matmul=b"library" * 1000) for rank in range(2)]
    store = MemoryStore()
    on_ranks(2, lambda one: exchange(session(one, folders[one.rank])), store)
    assert sum(map(len, store.values.values())) < 1000


def test_on_cpu_and_in_one_process_there_is_nothing_to_exchange(tmp_path: Path) -> None:
    silent = SimpleNamespace(rank=0, size=2)
    exchange(session(silent, tmp_path, backend="cpu"))
    exchange(session(SimpleNamespace(rank=0, size=1), tmp_path))
