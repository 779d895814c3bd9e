"""Base classes and rules of the typed config sections."""
