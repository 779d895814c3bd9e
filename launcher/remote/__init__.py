"""Ranks on several hosts: the head process (the launcher), a node process on each host, and their connections."""
