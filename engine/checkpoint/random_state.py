"""The state of every random generator a training script draws from, as tensors and JSON values."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def read_random_state(device: torch.device) -> dict[str, Any]:
    """torch's CPU generator, that of `device`, Python's, and numpy's old global one where it is imported."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        words = torch.tensor([int(word) for word in keys])
        state["numpy"] = {"name": name, "words": words, "rest": [position, has_gauss, cached]}
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on drawing where `state` was read. Generators that are not in it are left alone."""
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        saved = state["numpy"]
        words = numpy.array(saved["words"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state((saved["name"], words, *saved["rest"]))
