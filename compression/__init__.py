"""How the gradient of a unit is reduced over the ranks."""
