"""Hyperparameter groups of a case, over the parameters of one side's model."""

from __future__ import annotations

from typing import Any

from .case import Case
from .model import Net


def param_groups(case: Case, net: Net) -> list[dict[str, Any]] | None:
    """None: one group of every trainable parameter."""
    for feature in case.features:
        split = getattr(feature, "split", None)
        if split is not None:
            groups: list[dict[str, Any]] = split(net)
            return groups
    return None
