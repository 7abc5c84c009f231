"""The plugin: what JAX calls when it discovers backends, and all that runs inside a user's training.

``ENABLE_SEARCH`` unset: nothing is installed and nothing is imported. ``=1``: search phase.
``=0``: enactment phase. (DisCo, section 5: the switch the user sets.)
"""

import os
import sys


def initialize() -> None:
    """Install the plugin as ``ENABLE_SEARCH`` says. JAX calls it when it discovers backends. Never raises."""
    switch = os.environ.get("ENABLE_SEARCH", "").strip()
    if not switch:
        return
    if switch not in ("0", "1"):
        print(
            f"disco: off: ENABLE_SEARCH is {switch!r}; expected 1 (search), 0 (enact) or unset",
            file=sys.stderr,
        )
        return
    try:
        from disco_hlo.plugin.install import install_from_environment

        install_from_environment()
    except Exception as error:  # a plugin that cannot start must not stop the training
        print(f"disco: off: {type(error).__name__}: {error}", file=sys.stderr)
