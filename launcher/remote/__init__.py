"""Ranks on other machines: a head, a node part on each, and the ways between them."""
