"""Rollouts of a model that trains at stage 3, and its weights on their way out.

    python benchmarks/generation.py [--quick]

Two ranks, GPT-2 with 124 million parameters in fp32, batch 4, prompts of 16 tokens:

- tokens a second of `engine.generate` over those of a whole model in each process, and over those of gathers
  for each token
- gathers of a unit in a rollout of 128 tokens
- ten losses after a rollout, against a run without
- weights out: bytes, and time over that of one message with the same bytes into new memory
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from harness import Row, Watch, finish, mean_over_ranks, ratio_row, run_ranks, slowest  # noqa: E402

WORLD = 2
BATCH, PROMPT, TOKENS, FEW_TOKENS = 4, 16, 128, 8
BUCKET_BYTES = 64 << 20
LEAST_SPEED, LEAST_GAIN, MOST_TIME = 0.9, 20.0, 1.2
LARGE = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
SMALL = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 2000}


def build(sizes: dict[str, int]) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens))


def start(model: Any) -> Any:
    import xds

    zero = {"stage": 3, "stage3_max_reuse_distance": 0}
    sgd = {"type": "SGD", "params": {"lr": 1e-3}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": sgd, "zero_optimization": zero}
    return xds.initialize(model, config)


def train(engine: Any, steps: range, rank: int) -> list[float]:
    import torch

    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(0, 2000, (1, 32), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def timed(work: Any) -> float:
    import torch.distributed as dist

    dist.barrier()
    start_seconds = time.perf_counter()
    work()
    return time.perf_counter() - start_seconds


def rollouts(rank: int, world: int, sizes: dict[str, int], rounds: int) -> dict[str, list[float]]:
    """Seconds for a token, of each way, in turns; gathers of a unit; whether later losses are equal."""
    import torch

    plain, engine = build(sizes).eval(), start(build(sizes))
    prompt = torch.arange(BATCH * PROMPT).view(BATCH, PROMPT) % 2000
    how: dict[str, Any] = {
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(prompt),
    }
    found: dict[str, list[float]] = {"whole": [], "engine": [], "each token": [], "gathers": []}
    flats = [flat for unit in engine._sharded.units for flat in unit.params]
    counts = dict.fromkeys(map(id, flats), 0)
    for flat in flats:

        def gather(own: Any = flat._start_gather, key: int = id(flat)) -> Any:
            counts[key] += 1
            return own()

        flat._start_gather = gather
    more = {"max_new_tokens": FEW_TOKENS, "synced_gpus": True, **how}
    train(engine, range(1), rank)
    for _ in range(rounds):
        seconds = timed(lambda: plain.generate(prompt, max_new_tokens=TOKENS, **how))
        found["whole"].append(seconds / TOKENS)
        counts.update(dict.fromkeys(counts, 0))
        seconds = timed(lambda: engine.generate(prompt, max_new_tokens=TOKENS, **how))
        found["engine"].append(seconds / TOKENS)
        found["gathers"].append(max(counts.values()))
        engine.module.eval()
        found["each token"].append(
            timed(lambda: engine.module.generate(prompt, **more)) / FEW_TOKENS
        )
        engine.train()
    return found


def losses(rank: int, world: int, sizes: dict[str, int], *, rolls: bool) -> list[float]:
    import torch

    engine = start(build(sizes))
    found = train(engine, range(1), rank)
    if rolls:
        engine.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=20, do_sample=True)
    return found + train(engine, range(1, 11), rank)


def with_rollout(rank: int, world: int, sizes: dict[str, int]) -> list[float]:
    return losses(rank, world, sizes, rolls=True)


def without_rollout(rank: int, world: int, sizes: dict[str, int]) -> list[float]:
    return losses(rank, world, sizes, rolls=False)


def weights(rank: int, world: int, sizes: dict[str, int], rounds: int) -> dict[str, list[float]]:
    """Seconds and bytes of all weights, and those of one message with the same bytes."""
    import torch

    engine = start(build(sizes))
    collectives = engine._sharded.collectives
    size_bytes = sum(
        tensor.numel() * tensor.element_size() for tensor in dict(engine.weights()).values()
    )
    own = torch.ones(size_bytes // world, dtype=torch.uint8)
    found: dict[str, list[float]] = {"weights": [], "link": [], "bytes": []}

    def message() -> None:  # into new memory: who takes weights out needs it
        outs = [own if one == rank else torch.empty_like(own) for one in range(world)]
        collectives.all_to_all(outs, [own] * world, what="the link", kind="link").wait()

    def out() -> None:
        for _ in engine.weights(bucket_bytes=BUCKET_BYTES):
            pass

    for _ in range(rounds):
        found["link"].append(timed(message))
        before = engine.bytes_sent()["weights"]
        found["weights"].append(timed(out))
        found["bytes"].append((engine.bytes_sent()["weights"] - before) / size_bytes)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small model; keeps nothing")
    quick = parser.parse_args().quick
    sizes, rounds = (SMALL, 2) if quick else (LARGE, 3)
    rows = []
    with Watch() as watch:
        found = run_ranks(rollouts, WORLD, sizes, rounds, timeout_seconds=3600)
        times = slowest(found)
        fast = ratio_row(
            "tokens a second: engine over a whole model", times["whole"], times["engine"]
        )
        fast.must, fast.more_is_better = LEAST_SPEED, True
        gain = ratio_row(
            "tokens a second: engine over gathers for each token",
            times["each token"],
            times["engine"],
        )
        gain.must, gain.more_is_better = LEAST_GAIN, True
        gain.note = "the engine's own gathers, in the memory of one machine"
        rows += [fast, gain, Row("gathers of a unit in a rollout", max(times["gathers"]), must=1.0)]
        after = run_ranks(with_rollout, WORLD, SMALL)
        equal = after == run_ranks(without_rollout, WORLD, SMALL)
        rows.append(Row("losses after a rollout that differ", 0.0 if equal else 1.0, must=0.0))
        found = run_ranks(weights, WORLD, sizes, rounds)
        times = slowest(found)
        share = mean_over_ranks(found)["bytes"][0]
        rows.append(Row("weights out: bytes sent a rank over those of the model", share, must=0.5))
        late = ratio_row("weights out: time over one message", times["weights"], times["link"])
        late.must = MOST_TIME
        rows.append(late)
    for row in rows:
        row.others_busy = watch.others
    return finish(__file__, rows, keeps=not quick)


if __name__ == "__main__":
    sys.exit(main())
