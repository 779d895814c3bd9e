"""Reading and writing a sharded model from user code, and checks for unsupported operations."""
