"""`deepspeed.elasticity.utils`: whether this torch has the elastic agent."""

from __future__ import annotations


def is_torch_elastic_compatible() -> bool:
    """Always True: xds needs a torch that has it."""
    return True


__all__ = ["is_torch_elastic_compatible"]
