"""Which elements of a sharded model lie in which range: the arithmetic of checkpoints."""
