"""Tensor parallelism: which slice of each parameter this rank has."""
