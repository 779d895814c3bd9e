"""Native libraries: compiled on first use, kept in a cache, loaded."""
