"""The engine: reads the config, assembles its components, runs training steps, saves and loads."""
