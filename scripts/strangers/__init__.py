"""Trainings of others, each as its own loop runs it, on data that is made here (scripts/train_stranger.py)."""
