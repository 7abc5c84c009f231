"""The plugin: what JAX calls when it discovers backends, and all that runs inside a user's training.

``ENABLE_SEARCH`` unset: nothing is installed and nothing is imported. ``=1``: search phase.
``=0``: enactment phase. (DisCo, section 5: the switch the user sets.) ``DISCO_CAPTURE=folder``: save
the step in a folder, whatever the switch says.
"""

import contextlib
import os
import sys


def initialize() -> None:
    """Install the plugin as ``ENABLE_SEARCH`` says. JAX calls it when it discovers backends. Never raises."""
    switch = os.environ.get("ENABLE_SEARCH", "").strip()
    if os.environ.get("DISCO_CAPTURE", "").strip():
        switch = "0"
    if not switch:
        return
    if switch not in ("0", "1"):
        _say_off(f"ENABLE_SEARCH is {switch!r}; expected 1 (search), 0 (enact) or unset")
        return
    try:
        from disco_hlo.plugin.install import install_from_environment

        install_from_environment()
    except Exception as error:  # whatever keeps us from starting must not stop the training
        from disco_hlo.plugin.logs import one_line

        _say_off(one_line(error))


def _say_off(reason: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be closed, or None
        sys.stderr.write(f"disco: off: {reason}\n")
