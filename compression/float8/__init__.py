"""Linear layers whose matrices are multiplied in 8 bits (float8), by torchao."""
