"""Errors, messages, file helpers and config rules that every folder may import. Nothing here depends on training code."""
