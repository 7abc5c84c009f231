"""A training script that is in one job of several processes after the other, as an elastic one is.

    TRAIN_RANK=0 TRAIN_SIZE=2 TRAIN_PORTS=29000,29001 python train_again.py

Trains once for every port, as ``train.py`` does. With TRAIN_DIES=1 the process kills itself after the last, without a
word to the others; TRAIN_LOSES says to these in which of their jobs that is.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import jax
from jax.extend.backend import clear_backends

ports = os.environ["TRAIN_PORTS"].split(",")
for number, port in enumerate(ports, start=1):
    # Otherwise jax ends every process of a job that lost one; but where it is so, ranks do not leave together.
    jax.config.update("jax_enable_recoverability", str(number) == os.environ.get("TRAIN_LOSES"))
    os.environ["TRAIN_PORT"] = port
    trained = runpy.run_path(str(Path(__file__).with_name("train.py")))
    losses = trained["losses"]
    if number < len(ports):
        del trained
        jax.distributed.shutdown()
        print("left", number, file=sys.stderr, flush=True)
        jax.clear_caches()
        clear_backends()
if os.environ.get("TRAIN_DIES"):
    os.kill(os.getpid(), signal.SIGKILL)
