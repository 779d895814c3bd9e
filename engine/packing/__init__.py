"""Packed rows in forwards: what keeps their samples apart, and the proof that it does."""
