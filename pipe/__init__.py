"""Floor 2: which units this rank has."""
