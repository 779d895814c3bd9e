"""What each rank of a trial runs: one batch over and over, until the engine ends the experiment."""

from __future__ import annotations

import json
import sys
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ...engine.config.auto import trainer_values
from ...engine.config.config import Config, canonical_path
from ...engine.initialize import initialize
from ...engine.planning.models import ResizedBatches, model_source
from ...ops.torch_internals import tree_map

LARGEST_ON_HOST = 2_000_000_000  # parameters that are built on the host; larger models on meta


def main(text: str) -> None:
    """Train. text: JSON with model, sequence_length, trusts_code, and config, the path of a file."""
    order = json.loads(text)
    trusts = order["trusts_code"]
    source = ResizedBatches(
        model_source(order["model"], order["sequence_length"], trusts_code=trusts)
    )
    with open(order["config"], encoding="utf-8") as file:
        data = json.load(file)
    config = Config.load(data, auto=trainer_values(data, canonical_path))
    torch.manual_seed(0)
    size = sum(param.numel() for param in source.on_meta().parameters())
    with torch.device("meta" if size > LARGEST_ON_HOST else "cpu"):
        model = source.build()
    engine = initialize(model, config)
    batch = tree_map(
        lambda leaf: _on(leaf, engine.device), source.batch(engine.train_micro_batch_size_per_gpu())
    )
    while True:
        engine.train_batch(repeat(batch))


def _on(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


if __name__ == "__main__":
    main(sys.argv[1])
