"""What updates and by how much: optimizers, learning-rate schedules, the loss scale."""
