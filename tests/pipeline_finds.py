"""Test helper: models on which pipelines once gave wrong numbers, each compared with one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from pipeline_runs import Model, config_of
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

VOCAB, WIDTH, COUNT = 20, 8, 4  # fewer words than the models of pipeline_runs have


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens)


def project(embed: Embed, x: Tensor) -> Tensor:
    return F.linear(x, embed.words.weight)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tied_list(same_layer: bool) -> PipelineModule:
    """A list of layers with a tied embedding, or with one layer in first and last place."""
    first: Any = TiedLayerSpec("embed", Embed, tied_weight_attr="words.weight")
    last: Any = TiedLayerSpec("embed", Embed, forward_fn=project, tied_weight_attr="words.weight")
    middle: list[Any] = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    if same_layer:
        again = nn.Linear(WIDTH, WIDTH)
        middle = [again, *middle[:3], again]
    return PipelineModule([first, *middle, last], loss_fn=cross_entropy)


def worst_difference(model: nn.Module, config: dict[str, Any], steps: int = 2) -> float:
    """The largest difference of loss and norm between a pipeline and one process, without data ranks."""
    if isinstance(model, PipelineModule):
        model.build(range(len(model.layers)))
    plain = copy.deepcopy(model)
    params = [param for param in plain.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1)
    engine = xds.initialize(
        model,
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": COUNT,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            **config,
        },
    )
    found = 0.0
    for step in range(steps):
        data = torch.randint(
            0, VOCAB, (COUNT, 2, 2, 5), generator=torch.Generator().manual_seed(step)
        )
        expected = 0.0
        for tokens, labels in data:
            is_list = isinstance(plain, PipelineModule)
            loss = cross_entropy(plain(tokens), labels) if is_list else plain(tokens, labels)
            (loss / COUNT).backward()
            expected += loss.item() / COUNT
        norm = torch.nn.utils.clip_grad_norm_(params, float("inf")).item()
        optimizer.step()
        optimizer.zero_grad()
        loss = engine.train_batch(iter([(tokens, labels) for tokens, labels in data]))
        found = max(
            found, abs(loss.item() - expected), abs((engine.get_global_grad_norm() or 0.0) - norm)
        )
    engine.destroy()
    return found


def compare_tied_list(schedule: str, zero_stage: int, same_layer: bool) -> float:
    torch.manual_seed(0)
    config = {
        "zero_optimization": {"stage": zero_stage, "unit_min_numel": 0},
        "pipeline": {"stages": 2, "schedule": schedule},
    }
    return worst_difference(tied_list(same_layer), config)


def compare_deferred_on_host(schedule: str) -> float:
    torch.manual_seed(0)
    config = {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "pipeline": {"stages": 2, "schedule": schedule},
    }
    return worst_difference(Model(), config)


def refusal(schedule: str, chunks: int) -> str:
    """What `initialize` says of so many chunks of a small model."""
    section = {"schedule": schedule, "chunks": chunks}
    try:
        xds.initialize(Model(4), config_of(2, 4, pipeline=section))
    except xds.UsageError as error:
        return str(error)
    return "accepted"


def refusal_of_second() -> str:
    """What `initialize` says of a model that an earlier engine has cut."""
    model = Model(4)
    xds.initialize(model, config_of(2, 4)).destroy()
    try:
        xds.initialize(model, config_of(2, 4))
    except xds.UsageError as error:
        return str(error)
    return "accepted"


class Counted(nn.Linear):
    """Counts how many of its kind a rank builds, without those on the meta device."""

    count = 0

    def __init__(self) -> None:
        super().__init__(4, 4)
        Counted.count += not self.weight.is_meta


def built_layers() -> int:
    """How many of eight layers `initialize` builds on a rank that has four of them."""
    Counted.count = 0
    model = PipelineModule([LayerSpec(Counted) for _ in range(8)], loss_fn=F.mse_loss)
    xds.initialize(model, config_of(2, 4, pipeline={"partition": "uniform"})).destroy()
    return Counted.count
