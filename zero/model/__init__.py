"""The sharded model and its updates, put together from core and features."""
