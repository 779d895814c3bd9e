"""Imports checkpoints of other engines and plain weights. Nothing in their files is executed."""
