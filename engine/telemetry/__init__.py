"""Counters, timers, log lines and monitors of a training run."""
