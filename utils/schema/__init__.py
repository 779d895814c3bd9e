"""The kernel of typed config sections."""
