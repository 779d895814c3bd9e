"""Stores optimizer states, parameters and gradients in host memory or in files."""
