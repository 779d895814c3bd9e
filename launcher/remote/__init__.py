"""Runs ranks on several hosts: the head process (the launcher), and a node process on each host."""
