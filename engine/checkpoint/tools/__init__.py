"""What can be asked of checkpoints without training: are they whole, what differs."""
