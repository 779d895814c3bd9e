"""Sequence parallelism: each rank has some tokens of every sequence, and in attention some heads of all tokens."""
