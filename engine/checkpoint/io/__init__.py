"""Bytes of checkpoints: files, their sums, how they are written, committed and read."""
