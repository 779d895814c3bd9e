"""Starts the ranks of this machine with torch's elastic agent, supervises them, and reports failures."""
