"""Tests of vocabularies that are cut, and of copied heads: steps equal those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import runs
import torch
import torch.nn.functional as F
from helpers import run_ranks
from pipeline_runs import SAME, worst
from torch import nn

import xds

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

STEPS, SAMPLES, LENGTH, VOCAB = 3, 2, 12, 61  # a vocabulary that no number of ranks divides
ADAMW: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.01, "eps": 1e-3}
# SGD shows a factor on all gradients in the parameters; Adam hides it
UPDATES: dict[str, dict[str, Any]] = {"AdamW": ADAMW, "SGD": {"lr": 0.1}}


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
        pad_token_id=45,  # in the batches, in rows of a later rank: no rank trains that row
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


def train(model: tuple[Any, ...], config: dict[str, Any]) -> list[Any]:
    """(loss, norm) of each step, and the logits of a forward without labels."""
    engine = xds.initialize(build(*model), config)
    section, found = config["tensor_parallel"], list[Any]()
    widths = (VOCAB,)
    if section.get("vocab_parallel_lm_head"):
        widths = (VOCAB // section["tp_size"], VOCAB // section["tp_size"] + 1)
    for step in range(STEPS):
        outputs = engine(**batch(step, engine.dp_rank))
        assert outputs.logits.shape[-1] in widths
        engine.backward(outputs.loss)
        engine.step()
        found.append((outputs.loss.item(), engine.get_global_grad_norm()))
    with torch.no_grad():
        found.append(engine(input_ids=batch(9, 0)["input_ids"]).logits[0, -1].tolist())
    engine.destroy()
    assert "_loss_function" not in vars(engine.module)
    return found


@cache
def one_process(model: tuple[Any, ...], data: int, optimizer: str) -> list[Any]:
    whole = build(*model)

    def parts(step: int) -> list[dict[str, torch.Tensor]]:
        return [batch(step, rank) for rank in range(data)]

    how = {"optimizer": optimizer, **UPDATES[optimizer]}
    found = runs.plain(whole, STEPS, parts, lambda output: output.loss, **how)
    with torch.no_grad():
        return [*found, whole(input_ids=batch(9, 0)["input_ids"]).logits[0, -1].tolist()]


def config_of(tensor: int, stage: int, update: str = "AdamW", **section: Any) -> dict[str, Any]:
    how = {"optimizer": update, "params": UPDATES[update]}
    return runs.config(stage, **how, tensor_parallel={"tp_size": tensor, **section})


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
    wanted = one_process(model, data, config["optimizer"]["type"])
    assert worst(mean, wanted[:STEPS]) <= SAME
    assert torch.allclose(torch.tensor(firsts[0][-1]), torch.tensor(wanted[-1]), atol=2e-5)


COPIED = ("llama", True, 8, 2)


def test_a_cut_vocabulary_and_copied_heads_equal_one_process() -> None:
    compare(("llama", True), 2, config_of(2, 3, vocab_parallel_lm_head=True))
    compare(COPIED, 1, config_of(4, 3, "SGD"))
    config = config_of(3, 2, "SGD", vocab_parallel_lm_head=True)
    config["tensor_parallel"]["plan"] = {
        "model.embed_tokens": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    }
    compare(("llama", False), 1, config)


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
        assert own.equal(whole[:, part])  # a script may use logits after backward
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


def refused() -> None:
    with pytest.raises(xds.UsageError, match="has 2 heads of keys and values, fewer than ranks"):
        xds.initialize(build("llama", False, 2, 2), config_of(3, 0))


def test_fewer_heads_of_queries_than_ranks_are_refused() -> None:
    run_ranks(refused, 3)


# -- checkpoints ------------------------------------------------------------------------------------------


def saved_or_loaded(folder: str, config: dict[str, Any], saves: bool) -> dict[str, torch.Tensor]:
    engine = xds.initialize(build(*COPIED), config)
    if saves:
        engine.backward(engine(**batch(0, 0)).loss)
        engine.step()
        engine.save_checkpoint(folder, "saved")
    else:
        engine.load_checkpoint(folder, "saved")
    found = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return found


def test_checkpoints_of_cut_vocabularies_load_at_any_layout(tmp_path: Any) -> None:
    copied, uneven = (
        config_of(n, stage, vocab_parallel_lm_head=True) for n, stage in ((4, 2), (3, 1))
    )
    before = run_ranks(saved_or_loaded, 4, str(tmp_path), copied, True)[0]
    for after in run_ranks(saved_or_loaded, 3, str(tmp_path), uneven, False):
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in after)
