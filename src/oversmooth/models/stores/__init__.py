"""Checkpoints of every format as tensors by name."""
