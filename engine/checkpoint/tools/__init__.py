"""Tools for checkpoints without training: verify and compare."""
