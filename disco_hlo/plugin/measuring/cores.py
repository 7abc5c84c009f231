"""How many modules a rank compiles at once: each takes a core and some gigabytes, and ranks of a host share its cores.

Ranks go through the same modules in the same order, so many at a time. Where XLA:GPU's autotuner shares its work among
them, a rank waits inside a compile for what the others find; in the first module that some rank has not compiled
nobody waits for a later one, so they cannot wait for each other.
"""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Iterable

from disco_hlo.cores import own_cores
from disco_hlo.plugin.session import Session

_COMPILES_AT_ONCE = 8


def compiles_at_once(session: Session) -> int:
    """How many modules every rank compiles at once; the same number on all. A training that goes on keeps a core.

    Raises:
        ActivationError: ranks were silent.
    """
    mine = json.dumps([socket.gethostname(), own_cores()]).encode()
    answers = session.channel.all_gather(mine, tag="cores", timeout_s=session.timeout_s)
    fewest = fewest_cores(json.loads(answer) for answer in answers)
    return min(_COMPILES_AT_ONCE, fewest if session.between_steps is None else max(1, fewest - 1))


def fewest_cores(ranks: Iterable[tuple[str, list[int]]]) -> int:
    """The least number of cores that a rank has to itself, at least 1, where those of one host share what they may all
    run on.

    Args:
        ranks: each rank's host, and the cores it may run on.
    """
    hosts: dict[str, list[list[int]]] = defaultdict(list)
    for host, cores in ranks:
        hosts[host].append(cores)
    shares = [
        min(len(cores), len(set().union(*every)) // len(every)) for every in hosts.values() for cores in every
    ]
    return max(1, min(shares))
