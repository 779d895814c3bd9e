"""Sequence parallelism: a rank has some tokens of each sequence, and in attention some heads of all tokens."""
