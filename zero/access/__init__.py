"""Reading and writing a sharded model from a script, and checks for unsupported operations."""
