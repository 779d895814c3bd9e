"""Runs what a tuner tries, and shows what it found."""
