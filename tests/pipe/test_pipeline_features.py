"""Features of the engine in pipeline stages equal those without; loaders and evaluation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import run_ranks
from pipeline_runs import VOCAB, Model, batches, config_of, worst
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import xds
from xds.pipe.module import LayerSpec, PipelineModule

COUNT, STEPS = 4, 3
CALLS_WIDTH = 8
ON, CPU = {"enabled": True}, {"device": "cpu"}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.01}}


class Plain(nn.Module):
    """Blocks that the model checkpoints itself, with batch normalisation."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        blocks = (nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)
        self.norms = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, VOCAB)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        x = self.norms(x.transpose(1, 2)).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


FEATURES: dict[str, tuple[Any, str, dict[str, Any]]] = {  # name -> model, schedule, config
    "overlap": (
        lambda: Model(8, tied=True),
        "1f1b",
        {"zero": {"stage": 2, "offload_optimizer": CPU | {"overlap_step": True}}},
    ),
    "reduce each": (
        lambda: Model(8, tied=True),
        "zbv",
        {"zero": {"stage": 3}, "pipeline": {"reduce": "micro_batch"}},
    ),
    # a late gradient of a bias brings the earlier sum back; gradients that waited replaced that sum
    "deferred, on the host": (
        lambda: Model(8),
        "dualpipev",
        {"zero": {"offload_optimizer": CPU}},
    ),
    "reentrant": (lambda: Plain(True), "zbv", {"zero": {"stage": 1}}),
    "muon": (
        lambda: Model(8, tied=True),
        "1f1b",
        {
            "zero": {"stage": 1},
            "optimizer": {"type": "Muon", "params": {"lr": 1e-2}},
            "scheduler": WARMUP,
        },
    ),
}


def train(name: str, stages: int) -> list[tuple[float, float]]:
    """Loss and norm of each step on this rank."""
    build, schedule, changes = FEATURES[name]
    changes = copy.deepcopy(changes)
    pipeline = changes.pop("pipeline", {}) | {"schedule": schedule}
    torch.manual_seed(0)
    model = build()
    config = config_of(stages, COUNT, pipeline=pipeline if stages > 1 else {}, **changes)
    engine = xds.initialize(model, config)
    found = []
    for step in range(STEPS):
        each = batches(step, engine.dp_rank, engine.gradient_accumulation_steps())
        loss = engine.train_batch(iter(each))
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.quick("muon", "reduce each", "reentrant")
def test_features_equal_those_without_a_pipeline(name: str) -> None:
    data = 2 if name == "overlap" else 1
    expected = run_ranks(train, data, name, 1)[0]
    by_rank = run_ranks(train, 2 * data, name, 2)
    assert all(found == by_rank[0] for found in by_rank)
    assert worst(by_rank[0], expected) <= 1e-6


def from_training_data() -> list[Any]:
    """Every stage reads the data; then evaluation with outputs."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (64, 2, 6), generator=torch.Generator().manual_seed(3))
    data = TensorDataset(tokens[:, 0], tokens[:, 1])
    engine = xds.initialize(Model(4), config_of(2, COUNT), training_data=data)
    losses = [engine.train_batch().item() for _ in range(3)]
    sent = engine.bytes_sent()["broadcast"]
    samples = batches(9, engine.dp_rank, 3)
    loss, outputs = engine.eval_batch(iter(samples), 3, return_logits=True)
    count = None if outputs is None else len(outputs)
    engine.destroy()
    return [losses, sent, loss.item(), count]


def test_every_stage_reads_training_data() -> None:
    first, second, third, last = run_ranks(from_training_data, 4)
    assert [one[0] for one in (first, second, third, last)] == [first[0]] * 4
    assert first[2] == last[2]
    assert [one[3] for one in (first, second, third, last)] == [None, None, 3, 3]


# -- calls beside training: places, converted batches, outputs, losses left out ----------------------------


def calls_config(schedule: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"stages": 2, "schedule": schedule},
    }


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def linears(count: int = 4) -> list[Any]:
    return [LayerSpec(nn.Linear, CALLS_WIDTH, CALLS_WIDTH) for _ in range(count)]


def dict_batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {"x": torch.randn(2, CALLS_WIDTH, generator=generator), "y": torch.zeros(2, CALLS_WIDTH)}
        for _ in range(count)
    ]


def pair(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return batch["x"], batch["y"]


def calls(schedule: str) -> dict[str, Any]:
    """What the calls return on this rank. Only the first stage passes an iterator."""
    model = PipelineModule(linears(), loss_fn=squared, seed_layers=True)
    engine = xds.initialize(model, calls_config(schedule))
    engine.set_batch_fn(pair)
    reads = engine.stage_id == 0

    def some(count: int) -> Any:
        return iter(dict_batches(count)) if reads else None

    loss, outputs = engine.eval_batch(some(3), 3, return_logits=True)
    nothing, again = engine.eval_batch(some(3), 3, return_logits=True, compute_loss=False)
    was_training = engine.module.training
    engine.module.eval()
    again_loss = engine.eval_batch(some(3), 3)
    found = {
        "place": (engine.stage_id, engine.num_stages),
        "ends": (engine.is_first_stage(), engine.is_last_stage()),
        "loss": loss.item(),
        "outputs": outputs,
        "same": nothing is None and str(again) == str(outputs) and again_loss == loss,
        "each": engine.eval_batch(some(3), 3, reduce_output=None),
        "modes": (was_training, engine.module.training),
        "trained": engine.train_batch(some(4)).item(),
    }
    engine.destroy()
    return found


def plain() -> tuple[list[Tensor], list[Tensor]]:
    """Losses and outputs of the four micro-batches in one process."""
    model = PipelineModule(linears(), num_stages=1, loss_fn=squared, seed_layers=True)
    with torch.no_grad():
        outputs = [model(batch["x"]) for batch in dict_batches(4)]
    return [squared(out, torch.zeros(2, CALLS_WIDTH)) for out in outputs], outputs


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        ("1f1b", [(True, False), (False, True)]),
        ("zbv", [(True, True), (False, False)]),  # rank 0 has the first stage and the last
    ],
)
def test_evaluation_gives_losses_everywhere_and_outputs_on_the_last_stage(
    schedule: str, ends: list[tuple[bool, bool]]
) -> None:
    losses, outputs = plain()
    ranks = run_ranks(calls, 2, schedule)
    for rank, found in enumerate(ranks):
        assert found["place"] == (rank, 2)
        assert found["ends"] == ends[rank]
        assert found["loss"] == pytest.approx(torch.stack(losses[:3]).mean().item(), rel=1e-6)
        assert found["trained"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)
        assert found["same"]
        assert found["modes"] == (True, False)
        if found["ends"][1]:
            torch.testing.assert_close(found["outputs"], outputs[:3])
            torch.testing.assert_close(found["each"], losses[:3])
        else:
            assert found["outputs"] is None


class Counted(nn.Linear):
    """Counts how many of its kind all ranks build, without those on the meta device."""

    count = 0

    def __init__(self) -> None:
        super().__init__(4, 4)
        Counted.count += not self.weight.is_meta


def build_layers() -> None:
    model = PipelineModule([LayerSpec(Counted) for _ in range(8)], loss_fn=squared)
    xds.initialize(model, config_of(2, 4, pipeline={"partition": "uniform"})).destroy()


def test_a_rank_builds_its_own_layers_only() -> None:
    """A look at all modules built the whole model on every rank."""
    Counted.count = 0
    run_ranks(build_layers, 2)
    assert Counted.count == 8
