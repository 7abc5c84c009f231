"""Ports for the jobs that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import closing

# Below the ports that Linux hands to outgoing connections (32768 and up): a job binds its port seconds after
# it was found free, and mpiexec's own connections took one of those in between.
_PORTS = range(10_000, 30_000)


def free_port() -> int:
    """A port on which nobody listens, that no outgoing connection will be given."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with closing(socket.socket()) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
