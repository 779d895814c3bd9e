"""The process's rank, process group and device."""
