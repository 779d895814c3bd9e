"""Shows a plan: as text, and as a picture."""
