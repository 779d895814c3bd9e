"""Generation by the model that trains, and its weights for other programs."""
