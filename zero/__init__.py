"""Floor 2: which model states are sharded, and the units they are sharded in."""
