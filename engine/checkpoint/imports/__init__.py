"""Other engines' checkpoints and plain weights become a checkpoint. Nothing in their files is executed."""
