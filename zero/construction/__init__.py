"""Construction of models in slices, and loading of weights from files."""
