"""Parses the command line and decides where it runs. Starts no process."""
