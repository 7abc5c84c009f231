"""What the plugin adds to the start of a program that did not ask for it."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

REPEATS = 15
PROBE = """
import time
import importlib.metadata  # jax imports it anyway
start = time.perf_counter()
import disco_hlo.plugin
disco_hlo.plugin.initialize()
print((time.perf_counter() - start) * 1e3)
"""


def main() -> None:
    """Print the median over fresh processes, in ms."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    environment = {name: value for name, value in os.environ.items() if name != "ENABLE_SEARCH"}
    times = [
        float(
            subprocess.run(
                [sys.executable, "-c", PROBE], env=environment, capture_output=True, check=True
            ).stdout
        )
        for _ in range(REPEATS)
    ]
    print(
        f"import and initialize, ENABLE_SEARCH unset: median {statistics.median(times):.2f} ms of {REPEATS} runs"
    )


if __name__ == "__main__":
    main()
