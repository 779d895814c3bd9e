"""Files of checkpoints: their checksums, and how they are written, committed and read."""
