"""Training of models whose weights become quantized or pruned."""
