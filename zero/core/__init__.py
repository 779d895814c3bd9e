"""A sharded model at work: units, flat buffers, gathering, reducing, updating."""
