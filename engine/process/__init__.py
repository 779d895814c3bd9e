"""This process: its rank, its group, its device."""
