"""The engine: reads the config, assembles the parts, drives a training step, saves and loads."""
