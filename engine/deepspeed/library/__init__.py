"""What scripts use beside the engine: collectives, optimizers, timers, attention, monitors, and others."""
