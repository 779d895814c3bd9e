"""The JSON config: its sections, how they are read, checked and explained. Nothing here imports torch."""
