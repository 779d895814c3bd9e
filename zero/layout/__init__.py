"""What is where: flat buffers, slices, groups of ranks, units. Nothing here holds or sends values."""
