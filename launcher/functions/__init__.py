"""Runs a function of a notebook or a script on several ranks."""
