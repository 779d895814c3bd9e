"""Starts the ranks of this machine with torch's elastic agent, supervises and stops them, and reports failures."""
