"""Tests of more sequence ranks than heads: five steps equal those of one process, and bytes are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_runs import SAME, worst
from test_sequence_products import trained_in_stages
from test_sequence_training import SAMPLES, batch, build, config_of, one_process, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from warm_ranks import warm

import xds
from xds.ops.comm.opening import open_collectives
from xds.tensor.sequence import ring
from xds.tensor.sequence.blocks import Visibility
from xds.tensor.sequence.layout import layout_of
from xds.tensor.sequence.shares import shares

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

TWO, ONE = ("llama", 2, 2), ("llama", 1, 1)  # with these heads of keys and of queries


@pytest.mark.parametrize(
    ("model", "kind", "sequence", "stage"),
    [
        (TWO, "padded", 4, 3),
        (ONE, "packed", 2, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (TWO, "left", 4, 1),
                (("llama", 1, 2), "packed", 4, 2),  # one head of keys for two of queries
                (("mistral", 2, 2), "odd", 4, 3),  # a sliding window
                (("mistral", 1, 1), "packed", 3, 0),
                (("llama", 2, 4), "odd", 6, 3),  # three ranks exchange four heads, in two blocks
            )
        ),
    ],
)
def test_rings_equal_one_process(
    model: tuple[Any, ...], kind: str, sequence: int, stage: int
) -> None:
    by_rank = warm(sequence).run(train, model, kind, config_of(sequence, stage))
    assert all(found == by_rank[0] for found in by_rank)
    assert worst(by_rank[0], one_process(model, kind, 1)) <= SAME


@pytest.mark.slow
def test_rings_with_recomputed_blocks_equal_one_process() -> None:
    config = config_of(4, 3, activation_checkpointing={"enabled": True})
    found = warm(4).run(train, TWO, "packed", config)[0]
    assert worst(found, one_process(TWO, "packed", 1)) <= SAME


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "sent"), [("bf16", None), ("bf16", "fp32"), ("torch_autocast", "bf16")]
)
def test_rings_in_bf16_are_near_one_process(section: str, sent: str | None) -> None:
    more = {section: {"enabled": True, **({"dtype": "bfloat16"} if section != "bf16" else {})}}
    more["seq_parallel_communication_data_type"] = sent
    found = warm(4).run(train, TWO, "padded", config_of(4, 1, **more))[0]
    wanted = warm(1).run(train, TWO, "padded", config_of(1, 1, **more))[0]
    assert worst(found, wanted) <= 2e-2


@pytest.mark.slow
def test_a_ring_of_each_tensor_rank_equals_one_process() -> None:
    config = config_of(2, 1, tensor_parallel={"tp_size": 2})
    found = warm(4).run(train, TWO, "packed", config)
    assert all(worst(steps, one_process(TWO, "packed", 1)) <= SAME for steps in found)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "recomputes"), [("1f1b", False), ("zero_bubble", True)])
def test_rings_in_stages_equal_one_process(schedule: str, recomputes: bool) -> None:
    config = config_of(2, 2, activation_checkpointing={"enabled": recomputes})
    config |= {"gradient_accumulation_steps": 4, "pipeline": {"stages": 2, "schedule": schedule}}
    found = warm(4).run(trained_in_stages, config, ONE)
    plain = config | {"sequence_parallel_size": 1, "pipeline": {"stages": 1}}
    wanted = warm(1).run(trained_in_stages, plain, ONE)[0]
    assert all(worst(steps, wanted) <= SAME for steps in found)


def train_on_cut_batches(config: dict[str, Any]) -> list[float]:
    """Norms of gradients where the script cuts batches; each rank has its part of the loss of all tokens."""
    engine = xds.initialize(build(*TWO), config | {"sequence": {"cut_by": "script"}})
    size, rank = engine.world_size, engine.global_rank
    first, end = shares(13, size)[rank]
    found = []
    for step in range(5):
        ids = batch("odd", step, 0)["input_ids"]
        positions = torch.arange(13).expand_as(ids)
        logits = engine(input_ids=ids[:, first:end], position_ids=positions[:, first:end]).logits
        labels = nn.functional.pad(ids, (0, 1), value=-100)[:, first + 1 : end + 1]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        engine.backward(total / (12 * SAMPLES) * size)  # the engine takes the mean over ranks
        engine.step()
        found.append(engine.get_global_grad_norm())
    engine.destroy()
    return found


@pytest.mark.slow
def test_rings_of_batches_that_the_script_has_cut_equal_one_process() -> None:
    wanted = [norm for _, norm in one_process(TWO, "odd", 1)]
    for found in warm(4).run(train_on_cut_batches, config_of(4, 2)):
        assert found == pytest.approx(wanted, rel=1e-6)


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


def test_a_block_is_sent_only_to_ranks_that_see_it() -> None:
    layers, width, own = 2, 8, SAMPLES * 3  # one head; 12 tokens on 4 ranks
    keys = layers * 4 * own * 2 * width  # bytes of keys and values in fp32
    found = warm(4).run(sent_bytes, ONE, config_of(4, 1))
    # rank r is seen by the 3 - r ranks after it, and sees the r blocks before it, whose gradients it returns
    assert found == [[0, (3 - r) * keys, 0, (3 - r) * keys + r * keys] for r in range(4)]
    windowed = warm(4).run(sent_bytes, ("mistral", 1, 1), config_of(4, 1))
    # a window of five tokens reaches two blocks of three tokens before
    after, before = (2, 2, 1, 0), (0, 1, 2, 2)
    wanted = [[0, a * keys, 0, (a + b) * keys] for a, b in zip(after, before, strict=True)]
    assert windowed == wanted


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
    assert warm(2).run(ring_of_one_head, 1024, 64) == [(32 * 32, True)] * 2
    # the first rank sees 30 keys from its third ten queries, and the second all of the first block
    assert warm(2).run(ring_of_one_head, 10, 64) == [(10 * 30, True), (10 * 32, True)]


def refused(wanted: dict[str, Any]) -> str:
    model = build(*ONE)
    model.config._attn_implementation = "sdpa"
    for name, value in wanted.items():
        for layer in model.model.layers:
            setattr(layer.self_attn, name, value)
    engine = xds.initialize(model, config_of(2, 1))
    with pytest.raises(xds.UsageError) as caught:
        engine.train()
        engine(**batch("plain", 0, 0))
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        ({"attention_dropout": 0.1}, "does not support dropout = 0.1"),
        ({"is_causal": False}, "is_causal = False"),
    ],
)
def test_what_a_ring_does_not_compute_is_refused(wanted: dict[str, Any], part: str) -> None:
    for said in warm(2).run(refused, wanted):
        assert part in said and "set sequence_parallel_size to at most 1" in said
