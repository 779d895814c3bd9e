"""Features of the engine in pipeline stages equal those without; loaders, evaluation, layers in two stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import run_processes, run_ranks
from pipeline_runs import VOCAB, Model, batches, config_of, worst
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import xds
from xds.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

COUNT, STEPS = 4, 3
FEW_WORDS, CALLS_WIDTH = 20, 8
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
    "compiled, recomputed": (
        lambda: Model(8),
        "1f1b",
        {
            "compile": ON | {"backend": "aot_eager"},
            "activation_checkpointing": ON | {"cpu_checkpointing": True},
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
    found = {
        "place": (engine.stage_id, engine.num_stages),
        "ends": (engine.is_first_stage(), engine.is_last_stage()),
        "loss": loss.item(),
        "outputs": outputs,
        "same": nothing is None and str(again) == str(outputs),
        "each": engine.eval_batch(some(3), 3, reduce_output=None),
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
        if found["ends"][1]:
            torch.testing.assert_close(found["outputs"], outputs[:3])
            torch.testing.assert_close(found["each"], losses[:3])
        else:
            assert found["outputs"] is None


# -- layers in two stages of one rank, sums on the host, and what a rank builds -----------------------------


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(FEW_WORDS, CALLS_WIDTH)

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
    middle: list[Any] = [LayerSpec(nn.Linear, CALLS_WIDTH, CALLS_WIDTH) for _ in range(4)]
    if same_layer:
        again = nn.Linear(CALLS_WIDTH, CALLS_WIDTH)
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
            0, FEW_WORDS, (COUNT, 2, 2, 5), generator=torch.Generator().manual_seed(step)
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


def test_a_layer_in_two_stages_of_one_rank() -> None:
    """Its gradients come from two stages; it was taken as a block of the first one only."""
    for schedule, stage, same_layer in (("zbv", 0, False), ("dualpipev", 3, True)):
        assert max(run_ranks(compare_tied_list, 2, schedule, stage, same_layer)) < 1e-5


def test_weight_gradients_come_late_and_sums_are_on_the_host() -> None:
    """A late gradient of a bias brings the earlier sum back; gradients that waited replaced that sum."""
    assert max(run_ranks(compare_deferred_on_host, 2, "dualpipev")) < 1e-5


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


def test_a_rank_builds_its_own_layers_only() -> None:
    """A look at all modules built the whole model on every rank."""
    assert max(run_processes(built_layers, 2)) <= 4
