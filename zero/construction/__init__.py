"""Models that come into being in slices, and weights from outside."""
