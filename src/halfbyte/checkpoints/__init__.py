"""Checkpoint files of every family: recognised here, loaded by one module per family."""
