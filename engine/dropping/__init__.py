"""Schedules that act on the model: layers and tokens that are dropped, and keywords of its forward."""
