"""Shows a plan: as text, as a picture, and beside a real step."""
