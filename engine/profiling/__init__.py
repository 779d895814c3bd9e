"""Counts the operations of a model: MACs, FLOPs, parameters and latency of each module."""
