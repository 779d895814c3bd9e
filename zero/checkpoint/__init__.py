"""The mapping between elements of a sharded model and ranges in a checkpoint."""
