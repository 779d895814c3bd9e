"""How a model is divided among ranks: stages, slices, sequences, the groups of its flat buffers, messages."""
