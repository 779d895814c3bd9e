"""The sharded model: units, flat buffers, gathering, reduction and update."""
