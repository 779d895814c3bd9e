"""Recovery in live processes: a rank fails, and the others go on with the step that it was in."""
