"""DistributedAttention gives what attention of all tokens gives, with its gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from helpers import run_ranks
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import xds
from xds.tensor import DistributedAttention

RANKS, BATCH, TOKENS, WIDTH = 2, 2, 8, 4


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """[B, N, H, D]"""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, scale=scale
    ).transpose(1, 2)


def attend_tokens_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[N, B, H, D]"""
    return attend(*(x.transpose(0, 1) for x in (query, key, value))).transpose(0, 1)


def inputs(heads: int, kv_heads: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(BATCH, TOKENS, count, WIDTH) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def on_rank(heads: int, kv_heads: int, kind: str) -> list[Tensor]:
    rank, group = dist.get_rank(), dist.group.WORLD
    own = [x.chunk(RANKS, 1)[rank].clone().requires_grad_() for x in inputs(heads, kv_heads)]
    if kind == "ours":
        attention = DistributedAttention(attend, group)
        out = attention(*own, scale=0.3)
        # a pipeline asks so for shapes, and a message of a tensor without memory ended the process
        assert attention(*(x.to("meta") for x in own), scale=0.3).shape == out.shape
    else:
        from xds.deepspeed.sequence.layer import DistributedAttention as Theirs

        given = [x.transpose(0, 1) for x in own]
        out = Theirs(attend_tokens_first, group)(*given, 1).transpose(0, 1)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in own)]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kind"), [(6, 3, "ours"), (5, 5, "ours"), (4, 2, "deepspeed's")]
)
def test_outputs_and_gradients_are_those_of_all_tokens(
    heads: int, kv_heads: int, kind: str
) -> None:
    whole = [x.requires_grad_() for x in inputs(heads, kv_heads)]
    out = attend(*whole, scale=0.3 if kind == "ours" else None)
    out.square().sum().backward()
    ranks = run_ranks(on_rank, RANKS, heads, kv_heads, kind)
    wanted = [out, *(x.grad for x in whole)]
    for parts, expected in zip(zip(*ranks, strict=True), wanted, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), expected)


class Plain(nn.Module):
    """One attention with positions. `cuts`: it is made for sequence ranks."""

    def __init__(self, cuts: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.positions = nn.Embedding(TOKENS, 8)
        self.words = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)
        self.attend = DistributedAttention(attend) if cuts else attend

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        at = torch.arange(ids.shape[1]) if positions is None else positions
        x = self.words(ids) + self.positions(at)
        q = x.unflatten(-1, (2, -1))
        logits = self.head(self.attend(q, q, q).flatten(2))
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_batch(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 11, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))
    targets = ids.roll(-1, 1)
    targets[:, TOKENS // 2 - 1 if step else 1 :] = -100  # the second rank has no labels
    return ids, targets


CONFIG = runs.config(params={"eps": 1e-4}, sequence_parallel_size=RANKS)


def train_plain(config: dict[str, Any]) -> tuple[list[float], Tensor]:
    engine = xds.initialize(Plain(cuts=True), config)
    losses = []
    for step in range(3):
        losses.append(engine.backward(engine(*plain_batch(step))).item())
        engine.step()
    with torch.no_grad():
        logits = engine(plain_batch(0)[0])  # without targets: all tokens
    engine.destroy()
    return losses, logits


def test_a_plain_model_with_positions_trains_as_on_one_rank() -> None:
    ranks = run_ranks(train_plain, RANKS, CONFIG)
    wanted = run_ranks(train_plain, 1, CONFIG | {"sequence_parallel_size": 1})[0]
    for losses, logits in ranks:
        assert losses == pytest.approx(wanted[0], rel=1e-6)
        assert torch.allclose(logits, wanted[1], atol=1e-5)


class NoPositions(Plain):
    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, targets)


def refused_models() -> None:
    ids, targets = plain_batch(0)
    with pytest.raises(xds.UsageError, match="NoPositions takes no positions of its tokens"):
        xds.initialize(NoPositions(cuts=True), CONFIG)(ids, targets)
    with pytest.raises(xds.UsageError, match=r"has no xds.tensor.DistributedAttention"):
        xds.initialize(Plain(cuts=False), CONFIG)
    engine = xds.initialize(Plain(cuts=True), CONFIG)
    with pytest.raises(xds.UsageError, match="has 7 tokens, and all ranks of a plain model need"):
        engine(ids[:, 1:], targets[:, 1:])
    with pytest.raises(xds.UsageError, match="the batch has no labels"):
        engine(ids)
    attention = DistributedAttention(attend, dist.group.WORLD)
    with pytest.raises(xds.UsageError, match="1 heads of queries and 1 of keys on 2 ranks"):
        attention(*[torch.zeros(2, 4, 1, 4)] * 3)
    with pytest.raises(xds.UsageError, match="needs four dimensions"):
        attention(*[torch.zeros(2, 4, 4)] * 3)
    with pytest.raises(xds.UsageError, match="must be two of the dimensions"):
        DistributedAttention(attend, None, heads_dim=3)  # type: ignore[arg-type]


def test_what_cannot_be_cut_is_refused_on_every_rank() -> None:
    run_ranks(refused_models, RANKS)


def test_an_attention_of_transformers_gives_shapes_alone_on_the_meta_device() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from xds.tensor.sequence.attention import ARGUMENT, register

    given = [torch.empty(2, heads, 4, 8, device="meta") for heads in (6, 3, 3)]
    of_ranks = SimpleNamespace(group=SimpleNamespace(group="a process group"))
    attention = ALL_ATTENTION_FUNCTIONS[register("sdpa")]
    attended = attention(None, *given, None, **{ARGUMENT: of_ranks})
    assert attended[0].shape == (2, 4, 6, 8) and attended[0].is_meta
