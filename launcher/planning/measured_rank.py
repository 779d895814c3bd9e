"""One rank of `xds plan --measured`: two steps, and a file with what it holds and has sent.

python -m xds.launcher.planning.measured_rank config model folder [sequence length] ["trusts code"]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ...engine.initialize import initialize
from ...engine.planning.models import model_source
from ...utils.errors import UsageError


def main(
    config: str, model: str, folder: str, sequence_length: str = "", trusts_code: str = ""
) -> None:
    """Run the steps. The second one is measured: the first proves slices and sends shapes."""
    length = int(sequence_length) if sequence_length else None
    source = model_source(model, length, trusts_code=bool(trusts_code))
    torch.manual_seed(0)
    engine = initialize(source.build(), config)
    batch = source.batch(engine.train_micro_batch_size_per_gpu())
    if batch is None:
        raise UsageError(
            f"--measured: {model} gives no micro-batch; let the function return (model, batch)"
        )
    count = engine.gradient_accumulation_steps()
    engine.train_batch(iter([batch] * count))
    before, start = engine.bytes_sent(), time.perf_counter()
    engine.train_batch(iter([batch] * count))
    seconds, after = time.perf_counter() - start, engine.bytes_sent()
    found = {
        "held": engine.memory_plan(),
        "sent": {kind: after[kind] - before.get(kind, 0) for kind in after},
        "seconds": seconds,
    }
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    engine.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
