"""disco-hlo: joint op fusion, buckets of collectives and instruction order for JAX training steps.

Importing this package is cheap on purpose: it is reached from every JAX process
through the ``jax_plugins`` entry point. Heavy parts are imported where they are used.
"""

__version__ = "0.1.0"
