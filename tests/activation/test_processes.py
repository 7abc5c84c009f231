"""Ranks as real processes over jax.distributed and over a shared folder: agreement, faults, no hang."""

from pathlib import Path
from typing import Any

from tests.activation.jobs import at_every_moment, run_alone
from tests.ports import free_port

KV = "jax.distributed's key-value store"
DEFAULT = "XLA's default on all ranks: "


def assert_exchange(results: dict[int, Any], ranks: int, channel: str) -> None:
    """Every rank ends every step of the ``exchange`` scenario as every other, and as it should."""
    assert sorted(results) == list(range(ranks))
    assert all(result == results[0] for result in results.values())
    result = results[0]
    others, last = ("rank 0" if ranks == 2 else f"ranks 0-{ranks - 2}"), f"rank {ranks - 1}"
    sha = result["module_sha256"]
    assert result["channel"].startswith(channel)
    assert result["gathered"] == [str(rank) for rank in range(ranks)]
    assert result["same"] == {"enact_sha256": sha, "reason": ""}
    assert result["other batch size"] == {
        "enact_sha256": "",
        "reason": f"{DEFAULT}the ranks compile different training steps (another batch size or version?): "
        f"{others}: ffffffffffff; {last}: eeeeeeeeeeee",
    }
    assert result["older plan"] == {
        "enact_sha256": "",
        "reason": f"{DEFAULT}the ranks would enact different modules (an older plan somewhere?): "
        f"{others}: {sha[:12]}; {last}: dddddddddddd",
    }
    assert result["abstains"] == {
        "enact_sha256": "",
        "reason": f"{DEFAULT}not every rank has a plan to enact; {last}: module.hlo.pb is corrupt",
    }
    assert result["none"] == "the search failed"
    assert result["received"] == "garbage"


def test_two_processes_of_jax_distributed_agree_on_a_module_of_50_mb(tmp_path: Path) -> None:
    results, codes = run_alone("exchange", 2, tmp_path, port=free_port(), module_bytes=50_000_000)
    assert codes == [0, 0]
    assert_exchange(results, 2, KV)


def test_ctrl_c_ends_a_wait_on_jax_distributed(tmp_path: Path) -> None:
    results, _ = run_alone("interrupted", 2, tmp_path, port=free_port())
    assert results[0] == {"ended by": "KeyboardInterrupt"}


def test_a_worker_killed_leaves_rank_0_of_jax_distributed_with_the_default(tmp_path: Path) -> None:
    def run(folder: Path, moment: str) -> tuple[dict[int, Any], list[int]]:
        return run_alone("killed", 2, folder, port=free_port(), victim=1, moment=moment, timeout_s=1)

    for results, codes in at_every_moment(tmp_path, run).values():
        assert codes == [0, -9]
        assert results[0]["plan"] == "arrived"
        reason = f"{DEFAULT}rank 1 of 2 did not answer within 1 s"
        assert results[0]["outcome"] == {"enact_sha256": "", "reason": reason}


def test_rank_0_killed_ends_a_job_of_jax_distributed_without_a_hang(tmp_path: Path) -> None:
    def run(folder: Path, moment: str) -> tuple[dict[int, Any], list[int]]:
        return run_alone("killed", 2, folder, port=free_port(), victim=0, moment=moment, timeout_s=5)

    for results, codes in at_every_moment(tmp_path, run).values():
        # The store dies with rank 0. jax then aborts the other process, if our error does not end it first.
        assert codes[0] == -9
        assert codes[1] in (0, -6)
        assert (1 in results) == (codes[1] == 0)
        if 1 in results:
            assert "key-value store (in rank 0's process) does not answer" in str(results[1])


def test_three_processes_rank_0_killed_the_others_come_to_one_outcome(tmp_path: Path) -> None:
    def run(folder: Path, moment: str) -> dict[int, Any]:
        return run_alone("killed", 3, folder, victim=0, moment=moment, timeout_s=2)[0]

    for results in at_every_moment(tmp_path, run).values():
        assert_default_after(results, 3, victim=0)


def assert_default_after(results: dict[int, Any], ranks: int, victim: int) -> None:
    """The survivors use XLA's default for one and the same reason."""
    assert sorted(results) == [rank for rank in range(ranks) if rank != victim]
    reasons = {result["outcome"]["reason"] for result in results.values()}
    assert all(result["outcome"]["enact_sha256"] == "" for result in results.values())
    assert reasons == {f"{DEFAULT}rank {victim} of {ranks} did not answer within 2 s"}
