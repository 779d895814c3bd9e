"""Parameters in 8 bits, gradients in 4, and parameters kept inside a host: the messages of ZeRO++."""
