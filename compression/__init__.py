"""Floor 1: how a unit's gradient travels."""
