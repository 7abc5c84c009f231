"""Calls of compiled steps: seen, timed, run by other executables in turn, and given back (``docs/calls.md``)."""
