"""How a script reads and writes a sharded model, and what it is kept from."""
