"""A file of each rank on a local disk, for states that do not fit the host's memory."""
