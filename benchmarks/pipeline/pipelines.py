"""The contestants of the pipeline's step time: each builds its part of one GPT and returns a step function.

    layers   embedding, block 0 ... 3 │ block 4 ... 7, head      the same cut for all

All use AdamW with the same settings and clip the global gradient norm at 1.0. Other libraries run as
released.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Skip
from model import GPT, make_model
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # bytes [1, tokens], the bytes after them [1, tokens]
Step = Callable[[Sequence[Batch]], Tensor]

STAGES = 2
CLIP = 1.0
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Embedding(nn.Module):
    """The tokens' and positions' embeddings of a GPT."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.token, self.position = gpt.token, gpt.position

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, tokens] -> [batch, tokens, width]"""
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Head(nn.Module):
    """The last norm and the logits of a GPT."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> [batch, tokens, vocabulary] fp32"""
        return self.head(self.norm(x)).float()


def layers_of(size: str) -> list[nn.Module]:
    """The GPT `size` of benchmarks/step_time as a list; the same weights at each call."""
    gpt = make_model(size)
    assert isinstance(gpt, GPT)
    return [Embedding(gpt), *gpt.blocks, Head(gpt)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(name: str, size: str, count: int, bf16: bool) -> Step:
    """The contestant called `name`, ready for steps of `count` micro-batches.

    Raises:
        Skip: it cannot run here.
    """
    kind, _, stage = name.partition("-")
    layers = layers_of(size)
    if kind == "torch":
        return _torch(layers, count, bf16)
    if kind == "deepspeed":
        return _deepspeed(layers, count, bf16, int(stage))
    if kind == "compute":
        return _compute(layers, bf16)
    return _xds(layers, count, bf16, int(stage))


def _own(layers: list[nn.Module]) -> nn.Sequential:
    """This rank's half."""
    half = len(layers) // STAGES
    return nn.Sequential(*layers[dist.get_rank() * half :][:half])


def _json(count: int, bf16: bool, stage: int) -> dict[str, Any]:
    """The part of the config that xds and DeepSpeed share."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": count,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAMW | {"betas": list(ADAMW["betas"])}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
    }


def _xds(layers: list[nn.Module], count: int, bf16: bool, stage: int) -> Step:
    import xds
    from xds.pipe.module import PipelineModule

    model = PipelineModule(layers, loss_fn=loss_of, partition_method="uniform")
    engine = xds.initialize(model, _json(count, bf16, stage) | {"pipeline": {"stages": STAGES}})
    return lambda batches: engine.train_batch(iter(batches))  # type: ignore[no-any-return]


def _deepspeed(layers: list[nn.Module], count: int, bf16: bool, stage: int) -> Step:
    try:
        import deepspeed
        from deepspeed.pipe import PipelineModule
    except ImportError as error:
        raise Skip("deepspeed is not installed (step_time/requirements.txt)") from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    model = PipelineModule(layers, num_stages=STAGES, loss_fn=loss_of, partition_method="uniform")
    config = _json(count, bf16, stage) | {"steps_per_print": 10**9}
    config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}  # its own is not compiled
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters()], config=config
    )
    return lambda batches: engine.train_batch(iter(batches))  # type: ignore[no-any-return]


def _torch(layers: list[nn.Module], count: int, autocast: bool) -> Step:
    """torch's 1F1B. The loss is known to the last stage only."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    own, rank = _own(layers), dist.get_rank()
    parameters = list(own.parameters())
    stage = PipelineStage(own, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, count, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(parameters, fused=True, **ADAMW)

    def step(batches: Sequence[Batch]) -> Tensor:
        losses: list[Tensor] = []
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if rank == 0:
                schedule.step(torch.cat([tokens for tokens, _ in batches]))
            else:
                targets = torch.cat([targets for _, targets in batches])
                schedule.step(target=targets, losses=losses, return_outputs=False)
        norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
        square = torch.stack(norms).square().sum()
        dist.all_reduce(square)  # the norm spans the stages
        nn.utils.clip_grads_with_norm_(parameters, CLIP, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return step


def _compute(layers: list[nn.Module], bf16: bool) -> Step:
    """Forward and backward of this rank's half alone: no messages, no waiting and no update."""
    own, is_first = _own(layers), dist.get_rank() == 0
    own = own.bfloat16() if bf16 else own
    width = layers[1].norm_1.weight.numel()  # type: ignore[union-attr, operator]
    dtype = torch.bfloat16 if bf16 else torch.float32

    def step(batches: Sequence[Batch]) -> Tensor:
        loss = torch.zeros(())
        for tokens, targets in batches:
            if is_first:
                hidden = own(tokens)
                hidden.backward(torch.ones_like(hidden))
            else:
                arrived = torch.ones(*tokens.shape, width, dtype=dtype, requires_grad=True)
                loss = loss_of(own(arrived), targets)
                loss.backward()
        own.zero_grad()
        return loss

    return step


__all__ = ["STAGES", "Batch", "Step", "build", "layers_of", "loss_of"]
