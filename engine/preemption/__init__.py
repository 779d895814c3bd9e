"""Saves a checkpoint after a signal to stop, before the process exits."""
