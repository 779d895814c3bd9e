"""Sequence ranks, also in rings: steps equal those of one process, and bytes are exact."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import runs
import tensor_cases
import torch
import torch.distributed as dist
from helpers import run_ranks
from pipeline_runs import SAME, worst
from tensor_cases import Case
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import xds
from xds.ops.comm.opening import open_collectives
from xds.tensor.sequence import ring
from xds.tensor.sequence.batches import positions_of
from xds.tensor.sequence.blocks import Visibility
from xds.tensor.sequence.layout import layout_of
from xds.tensor.sequence.shares import shares

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

STEPS, SAMPLES, VOCAB = 3, 2, 61
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-3}
# SGD shows a factor on all gradients in the parameters; Adam hides it
UPDATES: dict[str, dict[str, Any]] = {"AdamW": ADAMW, "SGD": {"lr": 0.1}}
RECOMPUTED = {"activation_checkpointing": {"enabled": True}}


def build(name: str, kv_heads: int = 2, heads: int = 4) -> nn.Module:
    """A small model of transformers; mistral attends to the last five tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    sizes = {"hidden_size": 8 * heads, "intermediate_size": 56, "num_hidden_layers": 2}
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": VOCAB}
    more: dict[str, Any] = {"sliding_window": 5} if name == "mistral" else {}
    if name in ("opt", "biogpt"):
        more |= {"ffn_dim": 56, "word_embed_proj_dim": 8 * heads, "dropout": 0.0}
        more |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0}
    config = AutoConfig.for_model(name, **sizes, **counts, **more)
    return AutoModelForCausalLM.from_config(config)


def build_for(kind: str, *model: Any) -> nn.Module:
    """`build`; for documents in one row without a cache, as the guide says."""
    found = build(*model)
    found.config.use_cache = kind != "packed"
    return found


def batch(kind: str, step: int, data_rank: int) -> dict[str, torch.Tensor]:
    """kind: "plain", "padded" (with unequal numbers of labels), "left", "packed" or "odd" (13 tokens)."""
    draw = torch.Generator().manual_seed(50 * step + data_rank)
    length = 13 if kind == "odd" else 12
    ids = torch.randint(3, VOCAB, (SAMPLES, length), generator=draw)
    found = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, 5:] = 0
        found["labels"][mask == 0] = -100
        found["labels"][1, :3] = -100
        found["attention_mask"] = mask
    if kind == "left":  # padded on the left, by more tokens than a rank has
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][0, :7] = 0
        found["labels"][0, :7] = -100
    if kind == "packed":
        found["position_ids"] = torch.cat([torch.arange(7), torch.arange(5)]).repeat(SAMPLES, 1)
        found["labels"][:, 7] = -100
    return found


def train(model: tuple[Any, ...], kind: str, config: dict[str, Any]) -> list[tuple[float, float]]:
    engine = xds.initialize(build_for(kind, *model), config)
    found = []
    for step in range(STEPS):
        loss = engine(**batch(kind, step, engine.dp_rank)).loss
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


@cache
def one_process(
    model: tuple[Any, ...], kind: str, data: int, optimizer: str = "AdamW"
) -> list[runs.Step]:
    def parts(step: int) -> list[dict[str, Tensor]]:
        return [batch(kind, step, rank) for rank in range(data)]

    how = {"optimizer": optimizer, **UPDATES[optimizer]}
    return runs.plain(build_for(kind, *model), STEPS, parts, lambda output: output.loss, **how)


def config_of(sequence: int, stage: int, update: str = "AdamW", **more: Any) -> dict[str, Any]:
    how = {"optimizer": update, "params": UPDATES[update]}
    return runs.config(stage, **how, sequence_parallel_size=sequence, **more)


TWO, ONE = ("llama", 2, 2), ("llama", 1, 1)  # rings: with these heads of keys and of queries
BF16 = {"bf16": {"enabled": True}}

# model, kind of batch, sequence ranks, ZeRO stage, other sections; every second one runs SGD
CASES: list[tuple[tuple[Any, ...], str, int, int, dict[str, Any]]] = [
    (("llama",), "padded", 2, 3, {}),
    (("llama", 1), "packed", 2, 2, RECOMPUTED),  # one head of keys, copied
    (("mistral",), "odd", 2, 1, {}),  # a sliding window
    (("opt",), "left", 2, 1, {}),  # positions without padding
    (TWO, "padded", 4, 3, {}),
    (ONE, "packed", 2, 1, RECOMPUTED),
    (("mistral", 2, 2), "odd", 4, 0, {}),
    (TWO, "left", 4, 1, BF16),
]


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.quick("0", "1", "2", "3", "5", "6")
def test_sequence_ranks_equal_one_process(number: int) -> None:
    model, kind, sequence, stage, more = CASES[number]
    update = ("AdamW", "SGD")[number % 2]
    by_rank = run_ranks(train, sequence, model, kind, config_of(sequence, stage, update, **more))
    assert all(found == by_rank[0] for found in by_rank)
    near = 2e-2 if more is BF16 else SAME
    steps = slice(2 if more is BF16 else STEPS)
    assert worst(by_rank[0][steps], one_process(model, kind, 1, update)[steps]) <= near


def test_two_data_ranks_of_two_sequence_ranks_equal_one_process() -> None:
    by_rank = run_ranks(train, 4, ("llama",), "padded", config_of(2, 1, "SGD"))
    assert (by_rank[0], by_rank[2]) == (by_rank[1], by_rank[3])
    mean = [((a[0] + b[0]) / 2, a[1]) for a, b in zip(by_rank[0], by_rank[2], strict=True)]
    assert worst(mean, one_process(("llama",), "padded", 2, "SGD")) <= SAME


def stage_batches(step: int) -> list[dict[str, Tensor]]:
    """A document begins among the tokens of rank 0, and then of rank 1; two batches are padded."""
    found = [batch("plain", 4 * step + at, 0) for at in range(2)]
    for given, begin in zip(found, (4, 9), strict=True):
        positions = torch.cat([torch.arange(begin), torch.arange(12 - begin)])
        given["position_ids"] = positions.repeat(SAMPLES, 1)
    return [*found, *(batch("padded", 4 * step + at, 0) for at in (2, 3))]


def train_stages(config: dict[str, Any]) -> list[tuple[float, float]]:
    engine = xds.initialize(build_for("packed", "llama"), config)
    found = []
    for step in range(3):
        loss = engine.train_batch(iter(stage_batches(step)))
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


def test_batches_of_every_kind_in_stages_equal_one_process() -> None:
    pipeline = {"pipeline": {"stages": 2, "schedule": "zero_bubble"}}
    config = config_of(2, 2, accumulation=4, **RECOMPUTED, **pipeline)
    wanted = run_ranks(train_stages, 1, config_of(1, 0, accumulation=4))[0]
    assert all(worst(found, wanted) <= SAME for found in run_ranks(train_stages, 4, config))


def bytes_now(engine: Any) -> tuple[int, int]:
    found = engine.bytes_sent()
    return found.get("sequence heads", 0), found.get("sequence ring", 0)


def sent_bytes(model: tuple[Any, ...], config: dict[str, Any]) -> list[int]:
    """Of heads and in the ring: those of a forward, and of a backward."""
    engine = xds.initialize(build(*model), config)
    engine(**batch("plain", 0, 0))  # the first forward is proven on a few tokens
    counts = [bytes_now(engine)]
    loss = engine(**batch("plain", 0, 0)).loss
    counts.append(bytes_now(engine))
    engine.backward(loss)
    counts.append(bytes_now(engine))
    engine.destroy()
    return [counts[i + 1][kind] - counts[i][kind] for i in (0, 1) for kind in (0, 1)]


def test_heads_are_sent_once_in_a_pass_and_blocks_only_to_ranks_that_see_them() -> None:
    layers, width, own = 2, 8, SAMPLES * 3  # one head; 12 tokens on 4 ranks
    keys = layers * 4 * own * 2 * width  # bytes of keys and values in fp32
    found = run_ranks(sent_bytes, 4, ONE, config_of(4, 1))
    # rank r is seen by the 3 - r ranks after it, and sees the r blocks before it, whose gradients it returns
    assert found == [[0, (3 - r) * keys, 0, (3 - r) * keys + r * keys] for r in range(4)]
    windowed = run_ranks(sent_bytes, 4, ("mistral", 1, 1), config_of(4, 1))
    # a window of five tokens reaches two blocks of three tokens before
    after, before = (2, 2, 1, 0), (0, 1, 2, 2)
    wanted = [[0, a * keys, 0, (a + b) * keys] for a, b in zip(after, before, strict=True)]
    assert windowed == wanted
    tokens, width, kv_width = SAMPLES * 6, 32, 16  # with enough heads, half of each tensor is sent
    a_pass = 2 * 4 * tokens * (2 * width + 2 * kv_width) // 2  # of two layers
    assert run_ranks(sent_bytes, 2, ("llama",), config_of(2, 1)) == [[a_pass, 0, a_pass, 0]] * 2


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return found


def ring_of_one_head(rows: int, tokens: int) -> tuple[int, bool]:
    """The largest tensor, and whether output and gradients are those of attention to all tokens."""
    group = open_collectives(dist.group.WORLD, torch.device("cpu"))
    layout = layout_of(shares(tokens, group.world_size), 1, 1, group.rank)
    own = slice(*layout.blocks[layout.own])
    torch.manual_seed(1)
    *drawn, grad = torch.randn(4, 1, 1, tokens, 4, dtype=torch.float64)
    whole = [x.clone().requires_grad_() for x in drawn]
    parts = [x[:, :, own].clone().requires_grad_() for x in drawn]
    wanted = nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    wanted.backward(grad)
    before, ring.ROWS = ring.ROWS, rows
    with Largest() as largest:
        found = ring.Ring(group, layout, Visibility(), 0.5).attend(*parts)
        found.backward(grad[:, :, own])
    ring.ROWS = before
    pairs = [(found, wanted), *((x.grad, y.grad) for x, y in zip(parts, whole, strict=True))]
    return largest.numel, all(torch.allclose(x, y[:, :, own], rtol=1e-12) for x, y in pairs)


def test_a_rank_has_scores_of_some_queries_and_one_block() -> None:
    assert run_ranks(ring_of_one_head, 2, 1024, 64) == [(32 * 32, True)] * 2
    # the first rank sees 30 keys from its third ten queries, and the second all of the first block
    assert run_ranks(ring_of_one_head, 2, 10, 64) == [(10 * 30, True), (10 * 32, True)]


def test_positions_count_tokens_and_mark_all_padding() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]])
    assert positions_of(mask).tolist() == [[-1, -1, 0, 1], [0, 1, -1, -1], [0, -1, 1, 2]]


# -- what is refused ----------------------------------------------------------------------------------------


def refused(kind: str, model: tuple[Any, ...]) -> str:
    whole: Any = nn.Linear(4, 4) if kind == "plain model" else build(*model)
    given, config = batch("packed" if kind == "cached" else "plain", 0, 0), config_of(2, 1)
    for layer in whole.model.layers if kind != "plain model" else ():
        if kind == "dropout":
            layer.self_attn.attention_dropout = 0.1
        if kind == "not causal":
            layer.self_attn.is_causal = False
    if kind == "eager":
        whole.config._attn_implementation = "eager"
    if kind == "no labels":
        del given["labels"]
    if kind == "short":
        given = {name: value[:, :1] for name, value in given.items()}
    try:
        engine = xds.initialize(whole, config).train()
        if kind == "other batches":
            given = batch("plain", engine.global_rank, 0)
        engine(**given)
    except xds.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "model", "part"),
    [
        ("plain model", ("llama",), "Linear is not a causal language model of transformers"),
        ("eager", ("llama",), 'attn_implementation = "eager"'),
        ("other batches", ("llama",), "ranks 0 and 1 of a sequence group"),
        ("no labels", ("llama",), "pass labels="),
        ("short", ("llama",), "has 1 tokens"),
        ("cached", ("llama",), "set model.config.use_cache to false"),
        ("dropout", ONE, "does not support dropout = 0.1"),
        ("not causal", ONE, "is_causal = False"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank(kind: str, model: Any, part: str) -> None:
    for said in run_ranks(refused, 2, kind, model):
        assert part in said, said


def with_a_mask_of_its_own(config: dict[str, Any]) -> str:
    engine = xds.initialize(build("llama"), config)
    with pytest.raises(xds.UsageError) as caught:
        engine.train_batch(batch("plain", step, 0) for step in range(2))
    engine.destroy()
    return str(caught.value)


def test_a_mask_that_is_not_rebuilt_is_found_on_every_rank() -> None:
    from transformers.models.llama import modeling_llama

    def all_tokens(**inputs: Any) -> Tensor:
        length = inputs["inputs_embeds"].shape[1]
        return torch.ones(1, 1, length, length, dtype=torch.bool)

    with mock.patch.object(modeling_llama, "create_causal_mask", all_tokens):
        for stages in (1, 2):
            config = config_of(2, 1, accumulation=2, pipeline={"stages": stages})
            for said in run_ranks(with_a_mask_of_its_own, 2 * stages, config):
                assert "its attention has a mask of its own" in said


# -- checkpoints, metrics, DeepSpeed's class ----------------------------------------------------------------


def saved_or_loaded(
    folder: str, case: Case, saves: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters and first moments of the whole model, after a step and a save, or after a load."""
    engine = xds.initialize(tensor_cases.build(case.model, layers=2), case.config())
    if saves:
        engine.train_batch(tensor_cases.batches(case.model, 0, engine.dp_rank))
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    values = engine.full_state_dict(rank0_only=False, full_precision=True)
    moments = {
        name: xds.zero.get_full_optimizer_state(param, "exp_avg")
        for name, param in engine.module.named_parameters()
    }
    engine.destroy()
    return values, moments


def test_a_checkpoint_of_a_product_loads_at_others(tmp_path: Path) -> None:
    product, one, other = (
        Case("llama", 1, *lengths) for lengths in ((1, 2, 2, 1), (1, 1, 1, 0), (2, 1, 2, 3))
    )
    saved = run_ranks(saved_or_loaded, 4, str(tmp_path), product, True)[0]
    for case in (one, other):
        for found in run_ranks(saved_or_loaded, case.mesh.size, str(tmp_path), case, False):
            for kind, wanted in zip(found, saved, strict=True):
                assert kind.keys() == wanted.keys()
                assert all(torch.equal(kind[name], wanted[name]) for name in wanted)


def gather() -> tuple[torch.Tensor, str]:
    """Logits of both data ranks without labels; and the message for those with labels, which are cut."""
    engine = xds.initialize(build("llama"), config_of(2, 0))
    engine.eval()
    mine = batch("plain", 0, engine.dp_rank)
    with torch.no_grad():
        whole = engine.gather_for_metrics(engine(input_ids=mine["input_ids"]).logits, None)
        with pytest.raises(xds.UsageError) as error:
            engine.gather_for_metrics(engine(**mine).logits, None)
    engine.destroy()
    return whole, str(error.value)


def test_metrics_count_the_samples_of_sequence_ranks_once() -> None:
    model = build("llama").eval()
    with torch.no_grad():
        parts = [model(input_ids=batch("plain", 0, rank)["input_ids"]).logits for rank in (0, 1)]
    expected = torch.stack(parts, 1).flatten(0, 1)  # a row of each data rank in turn
    for whole, message in run_ranks(gather, 4):
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
        assert "ranks [0, 1] share samples" in message and "without labels" in message


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, N, H, D]"""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def theirs() -> list[Tensor]:
    """The same inputs through DeepSpeed's class, eager and compiled: outputs and gradients."""
    from xds.deepspeed.sequence.layer import DistributedAttention as Theirs

    module = Theirs(attend, dist.group.WORLD)
    given = torch.randn(SAMPLES, 4, 2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for call in (module.__call__, torch.compile(lambda *x: module(*x) * 2, backend="aot_eager")):
        x = given.clone().requires_grad_()
        out = call(x, x, x, 0)
        out.sum().backward()
        found += [out.detach(), x.grad]
    return found


def test_the_class_with_the_arguments_of_deepspeed_is_not_compiled() -> None:
    for out, grad, compiled_out, compiled_grad in run_ranks(theirs, 2):
        assert torch.equal(compiled_out, 2 * out)
        assert torch.allclose(compiled_grad, 2 * grad)


def forward_after_one_that_raised() -> tuple[torch.Size, torch.Size]:
    """The shapes of logits of whole tokens, before and after."""
    engine = xds.initialize(build("llama"), config_of(2, 0))
    given = batch("plain", 0, 0)
    engine.backward(engine(**given).loss)
    engine.step()
    engine.eval()
    whole = {"input_ids": given["input_ids"]}

    def raising(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with torch.no_grad():
        before = engine(**whole).logits.shape
        hook = engine.module.model.layers[1].mlp.register_forward_pre_hook(raising)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine(**given)
        hook.remove()
        after = engine(**whole).logits.shape
    engine.destroy()
    return before, after


def test_a_forward_that_raised_leaves_nothing_to_the_next() -> None:
    for before, after in run_ranks(forward_after_one_that_raised, 2):
        assert before == after == (SAMPLES, 12, VOCAB)
