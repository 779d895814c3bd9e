"""Where a shard is stored."""
