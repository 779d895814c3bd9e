"""Errors, messages, file helpers and config rules for every folder. Nothing here depends on training code."""
