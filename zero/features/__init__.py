"""What some configs ask for, and what watches user code: each file is one feature."""
