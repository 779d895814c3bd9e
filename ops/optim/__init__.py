"""Optimizers for flat shards."""
