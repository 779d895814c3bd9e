"""Floor 2: which slice of each parameter is local."""
