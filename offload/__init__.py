"""Floor 1: where a shard lives."""
