"""Tests of vocabularies that are cut, and of copied heads: five steps equal those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import run_ranks
from pipeline_runs import SAME, worst
from torch import nn

import xds

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

STEPS, SAMPLES, LENGTH, VOCAB = 5, 2, 12, 61  # a vocabulary that no number of ranks divides
ADAMW: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.01, "eps": 1e-3}
SLOW = pytest.mark.slow


def build(name: str, tied: bool, heads: int = 4, kv_heads: int = 2) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(
        name,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        vocab_size=VOCAB,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        attn_implementation="sdpa",
        use_cache=False,
        pad_token_id=3,  # in the batches, so that a row without a gradient is trained by no rank
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config)


def batch(step: int, data_rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(50 * step + data_rank)
    ids = torch.randint(3, VOCAB, (SAMPLES, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, 3:6] = -100
    labels[1, 8] = -100  # the same number of labels on every rank
    return {"input_ids": ids, "labels": labels}


def train(model: tuple[Any, ...], config: dict[str, Any], micro: int = 1) -> list[Any]:
    """(loss, norm) of each step, and the logits of a forward without labels."""
    engine = xds.initialize(build(*model), config)
    found: list[Any] = []
    for step in range(STEPS):
        batches = [batch(step, micro * engine.dp_rank + i) for i in range(micro)]
        if micro > 1:
            loss = engine.train_batch(iter(batches))
        else:
            outputs = engine(**batches[0])
            loss = outputs.loss
            cut = config["tensor_parallel"].get("vocab_parallel_lm_head", False)
            ranks = config["tensor_parallel"]["tp_size"]
            assert outputs.logits.shape[-1] in (
                (VOCAB // ranks, VOCAB // ranks + 1) if cut else (VOCAB,)
            )
            engine.backward(loss)
            engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    if micro == 1:
        with torch.no_grad():
            logits = engine(input_ids=batch(9, 0)["input_ids"]).logits
        found.append(logits[0, -1].tolist())
    engine.destroy()
    assert "_loss_function" not in vars(engine.module)
    return found


@cache
def one_process(model: tuple[Any, ...], data: int) -> list[Any]:
    whole = build(*model)
    params = list(whole.parameters())
    optimizer = torch.optim.AdamW(params, **ADAMW)
    found: list[Any] = []
    for step in range(STEPS):
        losses = [whole(**batch(step, rank)).loss / data for rank in range(data)]
        for loss in losses:
            loss.backward()
        norm = nn.utils.clip_grad_norm_(params, float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        found.append((sum(loss.item() for loss in losses), norm.item()))
    with torch.no_grad():
        found.append(whole(input_ids=batch(9, 0)["input_ids"]).logits[0, -1].tolist())
    return found


def config_of(tensor: int, stage: int, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"tp_size": tensor, **section},
    }


def compare(model: tuple[Any, ...], data: int, config: dict[str, Any]) -> None:
    tensor = config["tensor_parallel"]["tp_size"]
    by_rank = run_ranks(train, tensor * data, model, config)
    for at in range(0, len(by_rank), tensor):
        assert all(found == by_rank[at] for found in by_rank[at : at + tensor])
    firsts = by_rank[::tensor]
    mean = [
        (sum(step[0] for step in steps) / data, steps[0][1])
        for steps in zip(*[found[:STEPS] for found in firsts], strict=True)
    ]
    wanted = one_process(model, data)
    assert worst(mean, wanted[:STEPS]) <= SAME
    assert torch.allclose(torch.tensor(firsts[0][-1]), torch.tensor(wanted[-1]), atol=2e-5)


@pytest.mark.parametrize(
    ("tied", "data", "stage"),
    [
        (True, 2, 3),
        (False, 2, 1),
        pytest.param(True, 1, 0, marks=SLOW),
        pytest.param(True, 2, 2, marks=SLOW),
    ],
)
def test_a_cut_vocabulary_equals_one_process(tied: bool, data: int, stage: int) -> None:
    compare(("llama", tied), data, config_of(2, stage, vocab_parallel_lm_head=True))


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=SLOW)])
def test_three_ranks_with_a_plan_of_embeddings_equal_one_process(stage: int) -> None:
    config = config_of(3, stage, vocab_parallel_lm_head=True)
    config["tensor_parallel"]["plan"] = {
        "model.embed_tokens": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    }
    compare(("llama", False), 1, config)


@pytest.mark.parametrize(
    ("model", "tensor", "data", "stage"),
    [
        (("llama", True, 8, 2), 4, 1, 3),
        pytest.param(("llama", True, 8, 2), 4, 2, 1, marks=SLOW),
        pytest.param(("qwen3", False, 4, 1), 2, 1, 2, marks=SLOW),
        pytest.param(("llama", False, 8, 2), 3, 1, 2, marks=SLOW),  # shares of 2, 2 and 4 heads
        pytest.param(("llama", False, 4, 2), 3, 1, 0, marks=SLOW),  # shares of 1, 1 and 2 heads
    ],
)
def test_copied_heads_equal_one_process(
    model: tuple[Any, ...], tensor: int, data: int, stage: int
) -> None:
    compare(model, data, config_of(tensor, stage))


@pytest.mark.parametrize(
    ("tied", "stage", "cut"),
    [
        (True, 3, True),
        pytest.param(False, 0, True, marks=SLOW),
    ],
)
def test_a_cut_vocabulary_in_two_pipeline_stages_equals_one_process(
    tied: bool, stage: int, cut: bool
) -> None:
    config = config_of(2, stage, vocab_parallel_lm_head=cut)
    config |= {"gradient_accumulation_steps": 2, "pipeline": {"stages": 2}}
    by_rank = run_ranks(train, 4, ("llama", tied), config, 2)
    assert all(found == by_rank[0] for found in by_rank)
    assert worst(by_rank[0], one_process(("llama", tied), 2)[:STEPS]) <= SAME


# -- the loss alone -------------------------------------------------------------------------------------


def losses(dtype: torch.dtype) -> list[tuple[float, float]]:
    """The largest differences of a loss and of its gradient from torch's, for several options."""
    import torch.distributed as dist

    from xds.ops.comm.opening import open_collectives
    from xds.tensor.exchange import Exchange
    from xds.tensor.shares import share_of
    from xds.tensor.vocabulary import Vocabulary, cross_entropy

    group = open_collectives(dist.group.WORLD, torch.device("cpu"))
    ends = [share_of(13, group.world_size, rank) for rank in range(group.world_size)]
    vocabulary = Vocabulary(Exchange(group, "head"), [stop - start for start, stop in ends])
    generator = torch.Generator().manual_seed(1)
    whole = (30 * torch.randn(9, 13, generator=generator)).to(dtype)
    labels = torch.tensor([0, 12, 5, -100, 6, 4, 9, 5, 11])
    found = []
    for options in (
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"ignore_index": 5},
        {"label_smoothing": 0.1},
    ):
        ours, theirs = whole.clone().requires_grad_(), whole.clone().requires_grad_()
        targets = labels.where(labels >= 0, 3) if "ignore_index" in options else labels
        own = vocabulary.logits(ours[:, slice(*ends[group.rank])], is_training=True)
        before = group.sent_bytes.get("sums of losses", 0)
        loss = cross_entropy(own, targets, **options)
        rows = (
            3 if "label_smoothing" in options else 2
        )  # of [9] in one sum, after one gather of [9]
        ranks, tokens = group.world_size, 9 * whole.element_size()
        sent = group.sent_bytes["sums of losses"] - before
        assert sent == (ranks - 1) * tokens + 2 * (ranks - 1) * rows * tokens // ranks
        wanted = F.cross_entropy(theirs, targets, **options)
        weights = torch.arange(1.0, 1 + wanted.numel()).view(wanted.shape)
        (loss * weights).sum().backward()
        (wanted * weights).sum().backward()
        assert loss.dtype == wanted.dtype
        part = slice(*ends[group.rank])
        distance = (ours.grad[:, part] - theirs.grad[:, part]).abs().max().item()
        found.append(((loss - wanted).abs().max().item(), distance))
    with pytest.raises((IndexError, RuntimeError)):
        vocabulary.losses(own.detach(), torch.full((9,), 13), -100, 0.0)
    return found


def test_the_loss_of_cut_logits_is_that_of_torch() -> None:
    for found in run_ranks(losses, 3, torch.float64):
        assert all(max(pair) < 1e-13 for pair in found)


# -- other models ----------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Computes its loss itself, with torch's function or that of xds."""

    def __init__(self, loss: str, size: int = VOCAB) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.loss = loss
        self.tokens = nn.Embedding(size, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, size)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        if targets is None:
            return logits
        function = F.cross_entropy if self.loss == "torch" else xds.tensor.cross_entropy
        found = function(logits.flatten(0, 1), targets.flatten())
        return found + 0.1 * logits.logsumexp(-1).mean() if self.loss == "both" else found


PLAN = {"blocks.*.0": "colwise", "blocks.*.1": "rowwise", "tokens": "embedding_rowwise"}


def train_plain(loss: str) -> Any:
    engine = xds.initialize(Plain(loss), config_of(2, 1, vocab_parallel_lm_head=True, plan=PLAN))
    ids = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)
    found = engine(ids, ids % 7)
    if loss != "xds":
        with pytest.raises(xds.UsageError, match="without xds.tensor.cross_entropy"):
            engine.backward(found)
        return None
    engine.backward(found)
    engine.step()
    with pytest.raises(IndexError):
        engine(ids + VOCAB)
    return found.item(), engine(ids, ids % 7).item(), list(engine(ids).shape)


def test_a_plain_model_uses_the_loss_of_xds() -> None:
    model = Plain("torch")
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    ids = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)
    first = model(ids, ids % 7)
    first.backward()
    optimizer.step()
    wanted = (first.item(), model(ids, ids % 7).item())
    for found in run_ranks(train_plain, 2, "xds"):
        assert found[:2] == pytest.approx(wanted, rel=1e-6)
        assert found[2] == [SAMPLES, LENGTH, VOCAB]


class WithoutLabels(Plain):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(ids)


def losses_outside(sizes: list[int]) -> list[float]:
    """Of two steps of engines with vocabularies of these sizes; all logits are there before the first loss."""
    engines = [
        xds.initialize(
            WithoutLabels("xds", size), config_of(2, 1, vocab_parallel_lm_head=True, plan=PLAN)
        )
        for size in sizes
    ]
    found = []
    for step in range(2):
        ids = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH) + step
        every = [engine(ids).flatten(0, 1) for engine in engines]
        with torch.no_grad():
            assert engines[0].eval()(ids).shape[-1] == sizes[0]
            engines[0].train()
        for engine, logits in zip(engines, every, strict=True):
            loss = xds.tensor.cross_entropy(logits.float() / 2, ids.flatten() % 7)
            engine.backward(loss)
            found.append(loss.item())
        for engine in engines:
            engine.step()
    return found


def test_logits_of_two_engines_find_their_own_head() -> None:
    for mixed in run_ranks(losses_outside, 2, [VOCAB, 40]):
        assert mixed[::2] == run_ranks(losses_outside, 2, [VOCAB])[0]
        assert mixed[1::2] == run_ranks(losses_outside, 2, [40])[0]


@pytest.mark.parametrize("loss", ["torch", "both"])
def test_a_loss_of_torch_from_cut_logits_is_refused_in_backward(loss: str) -> None:
    run_ranks(train_plain, 2, loss)


def refused(model: tuple[Any, ...], config: dict[str, Any]) -> str:
    with pytest.raises(xds.UsageError) as caught:
        xds.initialize(build(*model), config)
    return str(caught.value)


def test_fewer_heads_of_queries_than_ranks_are_refused() -> None:
    for text in run_ranks(refused, 3, ("llama", False, 2, 2), config_of(3, 0)):
        assert "has 2 heads of keys and values, fewer than ranks" in text


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def list_of_layers(stages: int) -> nn.Module:
    from xds.pipe import LayerSpec, PipelineModule

    layers = [
        LayerSpec(nn.Embedding, VOCAB, 8),
        *(LayerSpec(Residual) for _ in range(4)),
        LayerSpec(nn.Linear, 8, VOCAB),
    ]

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return xds.tensor.cross_entropy(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(1)
    return PipelineModule(layers, num_stages=stages, loss_fn=loss, seed_layers=True)


def train_list(config: dict[str, Any]) -> list[float]:
    engine = xds.initialize(list_of_layers(config["pipeline"]["stages"]), config)
    found = []
    for step in range(3):
        ids = [batch(step, micro)["input_ids"] for micro in range(2)]
        pairs = [(tokens, tokens.roll(-1, 1)) for tokens in ids]
        found.append(engine.train_batch(iter(pairs)).item())
    found.append(engine.eval_batch(iter(pairs)).item())
    engine.destroy()
    return found


def test_a_list_of_layers_in_stages_with_a_cut_vocabulary_equals_one_process() -> None:
    plan = {
        "0": "embedding_rowwise",
        "*.up": "colwise",
        "*.down": "rowwise",
        "5": "colwise_gather_output",
    }
    config = config_of(2, 1, vocab_parallel_lm_head=True, plan=plan)
    config |= {"gradient_accumulation_steps": 2, "pipeline": {"stages": 2}}
    by_rank = run_ranks(train_list, 4, config)
    config["pipeline"] = {"stages": 1}
    config["tensor_parallel"] = {}
    wanted = run_ranks(train_list, 1, config)[0]
    assert all(found == pytest.approx(wanted, rel=1e-6) for found in by_rank)


# -- checkpoints ------------------------------------------------------------------------------------------

COPIED = ("llama", True, 8, 2)


def save(folder: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = xds.initialize(build(*COPIED), config)
    if "pipeline" in config:
        engine.train_batch(iter([batch(0, 0), batch(0, 1)]))
    else:
        engine.backward(engine(**batch(0, 0)).loss)
        engine.step()
    engine.save_checkpoint(folder, "saved")
    found = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return found


def load(folder: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = xds.initialize(build(*COPIED), config)
    engine.load_checkpoint(folder, "saved")
    found = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return found


TWO_STAGES = {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (1, config_of(1, 0)),
    "cut": (2, config_of(2, 3, vocab_parallel_lm_head=True)),
    "copied": (4, config_of(4, 2, vocab_parallel_lm_head=True)),
    "uneven": (3, config_of(3, 1, vocab_parallel_lm_head=True)),
    "stages": (4, config_of(2, 1, vocab_parallel_lm_head=True) | TWO_STAGES),
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("copied", "cut"),
        *(
            pytest.param(saved, loaded, marks=SLOW)
            for saved, loaded in zip(LAYOUTS, [*LAYOUTS][1:], strict=False)
        ),
    ],
)
def test_checkpoints_of_cut_vocabularies_load_at_any_layout(
    tmp_path: Any, saved: str, loaded: str
) -> None:
    world, config = LAYOUTS[saved]
    before = run_ranks(save, world, str(tmp_path), config)
    world, config = LAYOUTS[loaded]
    for after in run_ranks(load, world, str(tmp_path), config):
        assert after.keys() == before[0].keys()
        assert all(torch.equal(after[name], before[0][name]) for name in after)
