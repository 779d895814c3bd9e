"""Checkpoints: saved in one commit, loaded at any layout. docs/design/checkpoints.md has the format."""
