"""Cuts a model into the parts of a pipeline's ranks."""
