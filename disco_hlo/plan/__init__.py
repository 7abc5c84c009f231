"""Strategies and plans: what to execute, where it came from, and how a module is rewritten to do it."""
