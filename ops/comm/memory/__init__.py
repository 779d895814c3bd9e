"""Memory that the ranks of one machine share: this process's segment, and those of its peers."""
