"""Mixtures of experts: experts on different ranks, and tokens that are sent to them."""
