"""Checkpoints: committed atomically, loaded into any layout. docs/design/checkpoints.md has the format."""
