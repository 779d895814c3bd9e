"""Builds native libraries on first use and keeps them in a cache."""
