"""Floor 3: reads the config, assembles the parts, drives a step."""
