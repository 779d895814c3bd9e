"""Leaving in order when the process is asked to stop."""
