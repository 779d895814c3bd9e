"""Every causal language model of transformers with packed rows: equal to one sample a row, or refused.

    python benchmarks/packing_families.py [--only NAME ...] > results.txt
    python benchmarks/packing_families.py --read results.txt --write docs/packed-models.md

Each class of MODEL_FOR_CAUSAL_LM_MAPPING is built tiny, with the cache and the attention of its config. It
takes a step of plain SGD on packed rows through the engine, and one in plain PyTorch on the same samples, one a
forward. "Equal" is a loss and gradients that differ by at most 1e-5, relative to the loss and to the largest
gradient. Dropout is off, because random numbers differ. Each model runs in a fork with a limit of time. The
script ends with 1 where a model is neither equal nor refused.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import torch  # noqa: E402
from tiny_models import VOCAB, build, run_families  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: E402

import xds  # noqa: E402

ROW, NEAR = 32, 1e-5
LENGTHS = (9, 7, 12, 8, 15, 5, 11, 6, 13, 10)
PADDING = 0


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, VOCAB - 1, (n,), generator=generator) for n in LENGTHS]


def alone(model: nn.Module, data: list[Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one sample a row, with labels shifted here: no model's own rule counts."""
    total, count = torch.zeros(()), 0
    for ids in data:
        logits = model(input_ids=ids[None], labels=ids[None]).logits
        total = total + nn.functional.cross_entropy(
            logits[0, :-1].float(), ids[1:], reduction="sum"
        )
        count += len(ids) - 1
    loss = total / count
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads


def packed(model: nn.Module, data: list[Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of packed rows, by a step of SGD through the engine."""
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "data_packing": {"tokens": ROW, "columns": {"input_ids": PADDING, "labels": -100}},
    }
    engine = xds.initialize(model, config, training_data=data)
    seen: list[Tensor] = []
    total, count = 0.0, 0
    for batch in engine.training_dataloader:
        wanted = batch["labels"][:, 1:]
        logits = engine(**batch).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted.flatten())
        n = int((wanted != -100).sum())
        total, count = total + loss.item() * n, count + n
        engine.backward(loss, weight=n)
        engine.step()
        seen += list(rows_of(batch))
        if engine.global_steps:
            break
    assert sorted(map(tuple, (s.tolist() for s in seen))) == sorted(
        map(tuple, (s.tolist() for s in data))
    ), "the rows of the step are not the samples once"
    after = dict(engine.module.named_parameters())
    return total / count, {name: before[name] - after[name].detach() for name in before}


def rows_of(batch: dict[str, Tensor]) -> Iterator[Tensor]:
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        lengths = positions.eq(0).cumsum(0).unique(return_counts=True)[1].tolist()
        yield from (part for part in ids.split(lengths) if part[0] != PADDING)


def compare(name: str) -> str:
    """What became of one model, in words."""
    try:
        model, data = build(name), samples()
    except Exception as error:
        return f"not built: {type(error).__name__}: {error}"
    try:
        loss, grads = alone(model, data)
    except Exception as error:
        return f"does not train alone: {type(error).__name__}: {error}"
    model.zero_grad()
    attention = getattr(model.config, "_attn_implementation", "")
    try:
        found, found_grads = packed(build(name), data)
    except xds.UsageError as error:
        return f"refused: {error}"
    largest = max(float(grad.abs().max()) for grad in grads.values())
    far = {
        key: float((found_grads[key] - grad).abs().max()) / largest for key, grad in grads.items()
    }
    worst = max(far, key=lambda key: far[key])
    if abs(found - loss) > NEAR * loss or far[worst] > NEAR:
        return f"DIFFERS: loss {found:.6f} and {loss:.6f}, gradient of {worst} by {far[worst]:.1e}"
    return f"equal ({attention}): loss {loss:.4f}, gradients by {far[worst]:.1e}"


# -- the page -------------------------------------------------------------------------------------------------

HEADINGS = {
    "equal": "Equal to one sample a row",
    "refused: see": "Refused: tokens would see other samples",
    "refused: restart": "Refused: positions do not restart",
    "refused: begin": "Refused: positions do not begin at 0",
    "not tried": "Not tried",
}


PAGE = """# Packed rows: which models

All {} causal language models of transformers {}, built tiny, with the cache and the attention of their
configs, on a CPU: a step of SGD on [packed rows](data.md#no-token-sees-another-sample) through the engine,
against plain PyTorch with one sample a forward. Equal means that loss and gradients differ by at most 1e-5.
`python benchmarks/packing_families.py` tries them again.

- Each training proves its own model, with its weights, attention and device. One that is refused here may train
  on a GPU, where its kernels find the samples.
- Models that choose tokens by an index, such as DeepSeek V3.2, are equal for samples of at most `index_topk`
  tokens. In longer ones transformers breaks ties of the index by the place in the row.
"""


def kind_of(text: str) -> str:
    for word in ("see", "restart", "begin"):
        if text.startswith("refused") and f" {word} " in text:
            return f"refused: {word}"
    if text.startswith(("not built", "does not train alone")):
        return "not tried"
    return text.partition(" ")[0]


def page(results: dict[str, str]) -> str:
    """The guide's page of all models."""
    lines = [PAGE.format(len(results), version("transformers"))]
    for kind, heading in HEADINGS.items():
        names = sorted(name for name, text in results.items() if kind_of(text) == kind)
        lines += [f"## {heading} ({len(names)})", ""]
        if kind == "not tried":
            lines += ["| model | reason |", "|---|---|"]
            lines += [f"| `{name}` | {reason(results[name])} |" for name in names]
        else:
            lines += textwrap.wrap(", ".join(f"`{name}`" for name in names) + ".", 120)
        lines += [""]
    return "\n".join(lines)


def reason(text: str) -> str:
    """Without what markdown would read as its own."""
    short = text.partition(": ")[2].partition(". ")[0]
    return re.sub(r"[|`<>]", "", short)[:100].strip()


def main() -> int:
    causal = [name for name, kind in CONFIG_MAPPING.items() if kind in MODEL_FOR_CAUSAL_LM_MAPPING]
    shared = ["xds.engine.packing.forwards"]
    return run_families(
        __doc__, causal, compare, shared, page, lambda text: kind_of(text) in HEADINGS
    )


if __name__ == "__main__":
    sys.exit(main())
