"""Reads the record of a run, and draws it. Nothing here imports torch."""
