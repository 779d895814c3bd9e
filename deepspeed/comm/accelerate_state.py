"""What accelerate has to know on machines without a GPU: that the ranks form a process group.

accelerate counts ranks itself where it knows the backend. Without a GPU it knows none while it lets DeepSpeed
start the ranks, and then counts one: each rank would read the whole dataset. Here it learns the backend.
"""

from __future__ import annotations

import sys

import torch.distributed as dist


def tell_accelerate() -> None:
    """Enter the backend into accelerate's state, where accelerate is being set up and has none."""
    module = sys.modules.get("accelerate.state")
    state = getattr(getattr(module, "PartialState", None), "_shared_state", None)
    if isinstance(state, dict) and "backend" in state and state["backend"] is None:
        state["backend"] = dist.get_backend()


__all__ = ["tell_accelerate"]
