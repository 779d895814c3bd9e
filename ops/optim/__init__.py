"""Optimizers of flat shards."""
