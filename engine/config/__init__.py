"""The JSON config: its sections, their checks and their documentation. Nothing here imports torch."""
