"""Collectives on flat tensors, with their bytes counted."""
