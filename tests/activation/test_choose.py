"""The choice of a channel: a rule over what all ranks offer."""

import msgspec
import pytest

from disco_hlo.activation.channel import LocalChannel, name_ranks, unpack
from disco_hlo.activation.choose import Offer, choose, mpi_world_size, offer, open_channel
from disco_hlo.errors import ActivationError
from tests.activation.stores import MemoryStore
from tests.activation.test_kvstore import on_ranks

CAN = Offer("", "", "launch 1")
CANNOT = Offer("", "not started under MPI", "launch 1")


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "8", "PMI_RANK": "0"}, 8),
        ({"MV2_COMM_WORLD_SIZE": "2"}, 2),
        ({"SLURM_NTASKS": "16"}, None),
        ({"SLURM_NTASKS": "16", "PMIX_RANK": "3"}, 16),
        ({"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "4", "PMI_RANK": "3"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, None),
    ],
)
def test_the_launchers_environment_tells_the_size_of_mpis_world(
    environ: dict[str, str], size: int | None
) -> None:
    assert mpi_world_size(environ) == size


@pytest.mark.parametrize(
    ("environ", "obstacle"),
    [
        ({}, "not started under MPI"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, "MPI's world has 1 process, the job 2"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "MPI's world has 4 processes, this job only 2 of them"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ""),
    ],
)
def test_mpi_is_offered_only_where_the_job_is_mpis_world(environ: dict[str, str], obstacle: str) -> None:
    assert offer(2, environ, "").obstacle == obstacle


def test_mpi_for_all_or_for_none() -> None:
    assert choose([CAN, CAN]) == ("mpi", "every rank was started under MPI")
    assert choose([CAN, CANNOT, CANNOT]) == ("kv", "not started under MPI (ranks 1-2)")
    assert choose([CAN, Offer("", "", "launch 2")]) == ("kv", "the ranks come from different MPI launches")


def test_a_rank_that_was_started_again_does_not_wait_for_an_mpi_that_runs_without_it() -> None:
    runs = Offer("", "", "launch 1", runs_mpi=True)
    why = "MPI runs on the other ranks already and not on rank 1, as if started again"
    assert choose([runs, CAN, runs]) == ("kv", why)
    assert choose([runs, runs]) == ("mpi", "every rank was started under MPI")
    with pytest.raises(ActivationError, match="DISCO_CHANNEL=mpi, but MPI runs on the other ranks"):
        choose([runs, Offer("mpi", "", "launch 1")])


def test_a_process_in_the_place_of_one_that_had_joined_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It read what the process before it had agreed on, and waited for the others until the timeout."""
    store = MemoryStore()

    on_ranks(2, lambda one: open_channel(one.rank, 2, "job", store, {}, timeout_s=10))
    monkeypatch.setattr("disco_hlo.activation.choose._PROCESS", "another")
    with pytest.raises(ActivationError, match="rank 1 was started again, and the job goes on"):
        open_channel(1, 2, "job", store, {}, timeout_s=10)


def test_a_preference_of_one_rank_binds_all() -> None:
    assert choose([CAN, Offer("kv", "", "launch 1")]) == ("kv", "DISCO_CHANNEL=kv")


@pytest.mark.parametrize(
    ("offers", "message"),
    [
        ([CANNOT, Offer("mpi", "", "launch 1")], r"DISCO_CHANNEL=mpi, but not started under MPI \(rank 0\)"),
        ([Offer("kv", ""), Offer("mpi", "")], "DISCO_CHANNEL differs: mpi on rank 1, kv on rank 0"),
    ],
)
def test_a_preference_that_cannot_be_had_is_an_error_on_all_ranks(offers: list[Offer], message: str) -> None:
    with pytest.raises(ActivationError, match=message):
        choose(offers)


def test_a_single_process_needs_nobody() -> None:
    channel = open_channel(0, 1, "job", None, {"OMPI_COMM_WORLD_SIZE": "4"})
    assert isinstance(channel, LocalChannel)
    assert channel.broadcast(b"x", tag="t", timeout_s=1) == b"x"
    assert channel.all_gather(b"x", tag="t", timeout_s=1) == [b"x"]
    assert channel.decide(b"x", lambda items: items[0] * 2, tag="t", timeout_s=1) == b"xx"
    with pytest.raises(ActivationError, match="rank 0 must hand in the payload"):
        channel.broadcast(None, tag="t", timeout_s=1)


def test_several_processes_without_a_store_cannot_agree() -> None:
    with pytest.raises(ActivationError, match=r"without jax\.distributed's key-value store"):
        open_channel(0, 2, "job", None, {})


def test_an_offer_from_another_version_is_an_error_not_a_crash() -> None:
    store = MemoryStore()
    store.put("disco/opened/decided/choose/0/from/1", b'["kv"]')
    with pytest.raises(ActivationError, match="the same disco-hlo everywhere"):
        open_channel(0, 2, "opened", store, {}, timeout_s=1)


def test_ranks_that_do_not_come_to_the_choice_are_named() -> None:
    with pytest.raises(ActivationError, match=r"ranks 1-2 of 3 did not answer within 0\.1 s"):
        open_channel(0, 3, "job", MemoryStore(), {}, timeout_s=0.1)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], "no rank"), ([3], "rank 3"), ([4, 1, 2, 3, 7, 9, 8], "ranks 1-4, 7-9"), ([0, 2], "ranks 0, 2")],
)
def test_ranks_are_named_in_spans(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


def test_packed_items_come_apart_again() -> None:
    items = [b"", b"a", bytes(1000)]
    packed = msgspec.msgpack.encode(items)
    assert unpack(packed, 3) == items
    for damaged in (b"", packed[:-1], packed + b"x", msgspec.msgpack.encode(items[:2])):
        with pytest.raises(ActivationError):
            unpack(damaged, 3)
