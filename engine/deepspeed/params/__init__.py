"""Parameters and their states: `deepspeed.zero`, the `safe_get_` functions, checkpoints as plain weights."""
