"""Attention over the blocks of a layout: equal to masked dense attention, and to DeepSpeed's layouts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparse_layouts import CLASSES, COUNT, GROUP, digests
from torch import Tensor
from torch.autograd import forward_ad

import xds
from xds.ops import sparse_attention as sparse
from xds.ops.sparse_attention.on_cpu import tiles_of

# of 10,000 layouts and the numbers drawn for them, from the sparsity_config.py of DeepSpeed 0.19.6
DIGESTS = json.loads((Path(__file__).parents[1] / "sparse_layouts.json").read_text())


def make(name: str, more: dict[str, Any]) -> Any:
    return getattr(sparse, name)(**more)


@pytest.mark.parametrize(
    "count", [5 * GROUP, pytest.param(COUNT, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_layouts_are_those_of_deepspeed(count: int) -> None:
    assert digests(make, count) == DIGESTS[: count // GROUP]


def test_a_drawing_of_each_rule() -> None:
    """The rules as drawings, so that a reader sees them."""
    drawn = {
        "Fixed": ({"attention": "unidirectional"}, "x....... xx...... xxx..... xxxx.... ...xx..."),
        "BSLongformer": ({}, "xxxxxxxx xxx..... xxxx.... x.xxx... x..xxx.."),
        "LocalSlidingWindow": ({}, "x....... xx...... .xx..... ..xx.... ...xx..."),
        "Variable": (
            {"local_window_blocks": [1, 3]},
            "x....... xxxx.... xxxx.... xxxx.... x...xxx.",
        ),
    }
    for name, (more, rows) in drawn.items():
        layout = make(name, {"num_heads": 1, "block": 4, **more}).make_layout(32)[0]
        shown = ["".join(".x"[int(one)] for one in row) for row in layout[:5]]
        assert " ".join(shown) == rows, name
    assert {*drawn, "Dense", "BigBird"} == {*CLASSES}


def test_a_causal_big_bird_with_several_random_blocks_takes_what_there_is() -> None:
    made = sparse.BigBird(1, 1, num_random_blocks=3, attention="unidirectional").make_layout(9)
    assert torch.equal(made, made.tril())
    assert made[0, 0].sum() == 1


def wrong(**more: Any) -> Any:
    return lambda: sparse.Fixed(4, **more)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (wrong(num_local_blocks=3, num_global_blocks=2), ValueError, "multiple of"),
        (wrong(attention="both"), NotImplementedError, "bidirectional"),
        (wrong(attention="unidirectional", horizontal_global_attention=True), ValueError, "rows"),
        (wrong(num_different_global_patterns=2), ValueError, "different_layout_per_head"),
        (lambda: sparse.Variable(1, local_window_blocks=[]), ValueError, "needs lengths"),
        (lambda: sparse.BSLongformer(1, global_block_indices=[-1]), ValueError, "at least 0"),
        (lambda: sparse.Dense(1, 16).make_layout(17), ValueError, "pad it"),
        (lambda: sparse.BigBird(1, 1).make_layout(2), ValueError, "has fewer"),
        (lambda: sparse.Dense(0), ValueError, "at least 1"),
        (lambda: sparse.Dense(1, 1.5), ValueError, "block = 1.5: must be a whole number"),
        (lambda: sparse.Dense(1, 16).make_layout(-16), ValueError, "pad it"),
        (lambda: sparse.BigBird(1, num_global_blocks=-2), ValueError, "and at least 0"),
        (wrong(num_global_blocks=0), ValueError, "multiple of num_global_blocks = 0"),
        (lambda: sparse.Variable(1, local_window_blocks=3), ValueError, "must be a list"),
    ],
)
def test_rules_that_contradict_themselves_are_refused(call: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


# -- attention ------------------------------------------------------------------------------------------


def computed(way: str, tensors: list[Tensor], layout: Tensor, **more: Any) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    own = [x.clone().requires_grad_() for x in tensors]
    out = sparse.sparse_attention(*own, layout, way=way, **more)
    torch.manual_seed(0)
    out.backward(torch.randn(out.shape).to(out.dtype))
    return [out.detach(), *(x.grad for x in own)]  # type: ignore[misc]


def problem(rng: random.Random, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    batch, key_heads, group = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 3)
    block, n = rng.choice((2, 8, 16)), rng.randint(1, 9)
    length = max(1, n * block - rng.randint(0, block - 1))
    heads = key_heads * group
    q = torch.randn(batch, length, heads, 16, dtype=dtype).transpose(1, 2)  # not contiguous
    k = torch.randn(batch, key_heads, length, 16, dtype=dtype)
    v = torch.randn(batch, key_heads, length, rng.choice((8, 16)), dtype=dtype)
    layout = (torch.rand(rng.choice((1, heads)), n, n) < 0.4).long()
    if rng.random() < 0.5:
        layout |= torch.eye(n, dtype=torch.int64)
    padding = None if rng.random() < 0.5 else torch.rand(batch, length) < 0.7
    scale = rng.choice((None, 0.3))
    more = {"block": block, "padding": padding, "is_causal": rng.random() < 0.5, "scale": scale}
    return [q, k, v], layout, more


def test_output_and_gradients_are_those_of_masked_dense_attention() -> None:
    """Grouped heads, padding, rows that see nothing, uneven lengths, a layout for each head."""
    rng = random.Random(1)
    torch.manual_seed(1)
    for _ in range(40):
        tensors, layout, more = problem(rng)
        found = computed("blocks", tensors, layout, **more)
        for one, wanted in zip(found, computed("dense", tensors, layout, **more), strict=True):
            torch.testing.assert_close(one, wanted, rtol=0, atol=1e-5)


def test_long_rows_are_merged_from_pieces() -> None:
    torch.manual_seed(2)
    tensors = [torch.randn(1, 2, 2500, 8) for _ in range(3)]
    layout = torch.ones(1, 40, 40, dtype=torch.int64)
    for is_causal in (False, True):
        found = computed("blocks", tensors, layout, block=64, is_causal=is_causal)
        wanted = computed("dense", tensors, layout, block=64, is_causal=is_causal)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_block_may_be_longer_than_the_sequence() -> None:
    torch.manual_seed(5)
    tensors = [torch.randn(1, 2, 7, 8) for _ in range(3)]
    layout = torch.ones(1, 1, 1, dtype=torch.int64)
    found = computed("blocks", tensors, layout, block=1 << 40, is_causal=True)
    wanted = computed("dense", tensors, layout, block=8, is_causal=True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["auto", "dense"])
def test_an_empty_batch_and_a_sequence_without_tokens(way: str) -> None:
    for heads, shape in ((1, (0, 4, 5, 8)), (4, (2, 4, 0, 8)), (1, (2, 4, 0, 8))):
        tensors = [torch.randn(shape) for _ in range(3)]
        layout = torch.ones(heads, 2, 2)
        out, *grads = computed(way, tensors, layout, block=3, is_causal=True)
        assert {out.shape, *(grad.shape for grad in grads)} == {shape}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    torch.manual_seed(3)
    tensors, layout, more = problem(rng, dtype)
    found = computed("blocks", tensors, layout, **more)
    wanted = computed("dense", [x.float() for x in tensors], layout, **more)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_gradients_follow_finite_differences_also_with_dropout() -> None:
    tensors = [torch.randn(2, 2, 11, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    layout = (torch.rand(2, 3, 3) < 0.6).long() | torch.eye(3, dtype=torch.int64)

    def dropped(*own: Tensor) -> Tensor:
        torch.manual_seed(3)
        return sparse.sparse_attention(*own, layout, block=4, dropout=0.3)

    assert torch.autograd.gradcheck(dropped, tensors)


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 64, 8), torch.randn(1, 1, 64, 8)
    v, layout = torch.ones(1, 1, 64, 1), torch.ones(1, 4, 4, dtype=torch.int64)
    draws = [sparse.sparse_attention(q, k, v, layout, block=16, dropout=0.4) for _ in range(50)]
    assert torch.stack(draws).mean().item() == pytest.approx(1.0, abs=0.02)
    assert not torch.equal(draws[0], draws[1])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.slow
def test_flex_attention_has_the_same_values() -> None:
    """Only its forward: on a CPU torch has no backward of it."""
    rng = random.Random(4)
    torch.manual_seed(4)
    with torch.no_grad():
        for block in (32, 192):
            for has_padding in (False, True):
                heads, n = 2 * rng.randint(1, 2), rng.randint(1, 6)
                length = n * block - rng.randint(0, block - 1)
                tensors = [torch.randn(2, count, length, 16) for count in (heads, 2, 2)]
                layout = (torch.rand(rng.choice((1, heads)), n, n) < 0.4).long()
                padding = torch.rand(2, length) < 0.7 if has_padding else None
                more: Any = {"block": block, "padding": padding, "is_causal": n % 2 == 0}
                found = sparse.sparse_attention(*tensors, layout, way="flex", **more)
                wanted = sparse.sparse_attention(*tensors, layout, way="dense", **more)
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_tiles_are_remembered_by_layout() -> None:
    """Two layouts of one length are two entries; equal ones are one."""
    one, other = torch.eye(4).long()[None], torch.ones(1, 4, 4).long()
    first = tiles_of(one, 16, 1, is_causal=False)
    assert tiles_of(one.clone(), 16, 1, is_causal=False) is first
    assert tiles_of(other, 16, 1, is_causal=False) is not first


def test_calls_that_do_not_fit_are_refused() -> None:
    q = torch.randn(1, 4, 32, 8)
    layout = torch.ones(1, 2, 2, dtype=torch.int64)
    whole: dict[str, Any] = {"q": q, "k": q, "v": q, "layout": layout, "block": 16}
    for change, text in (
        ({"k": q[:, :, :16], "v": q[:, :, :16]}, "of one sequence"),
        ({"layout": layout[:, :1, :1]}, "at least 2 blocks"),
        ({"layout": layout.expand(3, 2, 2)}, r"\[1 or 4, n, n\]"),
        ({"layout": torch.ones(1, 2, 3)}, r"\[1, 2, 3\].*needs a tensor"),
        ({"layout": [[[1]]]}, "list.*needs a tensor"),
        ({"k": q[:, :3], "v": q[:, :3]}, "no multiple of 3 key heads"),
        ({"k": q[:, :2]}, "k and v as many heads"),
        ({"k": q[..., :4]}, "one width"),
        ({"k": q[:0], "v": q[:0]}, "one batch size"),
        ({"q": q[0]}, "at least one head"),
        (dict.fromkeys("qkv", q[..., :0]), "at least one head"),
        ({"k": q.long()}, "floating"),
        ({"block": 0}, "block = 0: must be a whole number"),
        ({"block": 16.0}, "must be a whole number"),
        ({"padding": torch.ones(1, 16)}, r"padding \[1, 16\]: needs \[1, 32\]"),
        ({"dropout": 1.0}, "dropout = 1.0: must be at least 0 and below 1"),
        ({"dropout": float("nan")}, "dropout = nan"),
        ({"way": "cpu"}, "way = 'cpu': must be one of"),
    ):
        with pytest.raises(xds.UsageError, match=text):
            sparse.sparse_attention(**{**whole, **change})


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch about itself
def test_a_derivative_in_forward_mode_is_refused() -> None:
    q = torch.randn(1, 2, 32, 8)
    layout = torch.ones(1, 2, 2, dtype=torch.int64)
    with forward_ad.dual_level(), pytest.raises(xds.UsageError, match="no derivative in forward"):
        sparse.sparse_attention(forward_ad.make_dual(q, q), q, q, layout, block=16)


# -- modules --------------------------------------------------------------------------------------------


def test_the_module_is_causal_inside_blocks_unless_asked_for_deepspeeds_leak() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 16, 8)
    rule = sparse.Fixed(2, 4, attention="unidirectional")
    changed = q.clone()
    changed[:, :, 3] += 1
    for leaks in (False, True):
        module = sparse.SparseSelfAttention(rule, max_seq_length=32, block_causality=leaks)
        one, other = module(q, q, q), module(q, changed, changed)
        assert torch.equal(one[:, :, :3], other[:, :, :3]) is not leaks
        assert not torch.equal(one[:, :, 3:], other[:, :, 3:])


def test_masks_and_relative_positions_are_those_of_deepspeed() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 24, 8) for _ in range(3))
    rule = sparse.BSLongformer(2, 8, num_sliding_window_blocks=1)
    rpe, attn = torch.randn(24, 24), (torch.rand(24, 24) < 0.8).float()
    hidden = torch.rand(2, 24) < 0.3
    seen = rule.make_layout(24)[:1].bool()
    seen = seen.repeat_interleave(8, 1).repeat_interleave(8, 2)
    for mode, mask in (
        ("mul", (~hidden).float()),
        ("add", hidden * -10000.0),
        ("add", torch.randn(2, 24)),
    ):
        added = mask if mode == "add" else torch.where(mask == 0, -torch.inf, 0.0)
        for more in ({}, {"rpe": rpe, "attn_mask": attn}):
            module = sparse.SparseSelfAttention(rule, mode, max_seq_length=48)
            found = module(q, k, v, key_padding_mask=mask, **more)
            scores = q @ k.transpose(2, 3) * 8**-0.5 + added[:, None, None]
            scores = scores.masked_fill(~seen, -torch.inf)
            if more:
                scores = (scores + rpe).masked_fill(attn == 0, -torch.inf)
            torch.testing.assert_close(found, scores.softmax(-1) @ v, rtol=0, atol=1e-5)


def test_masks_of_other_shapes_are_refused() -> None:
    q = torch.randn(2, 2, 24, 8)
    module = sparse.SparseSelfAttention(sparse.Fixed(2, 8), max_seq_length=48)
    for name, shape in (("key_padding_mask", (2, 12)), ("attn_mask", (12, 12)), ("rpe", (24, 12))):
        with pytest.raises(xds.UsageError, match=name):
            module(q, q, q, **{name: torch.zeros(shape)})
    with pytest.raises(xds.UsageError, match="must be a rule"):
        sparse.SparseSelfAttention("fixed")  # type: ignore[arg-type]
    config = SimpleNamespace(hidden_size=16, num_attention_heads=2)
    bert = sparse.BertSparseSelfAttention(config)
    with pytest.raises(xds.UsageError, match="as in a decoder"):
        bert(torch.randn(1, 4, 16), torch.ones(4, 4).tril().bool()[None, None])


def test_a_pretrained_bert_gets_sparse_layers_and_more_positions() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(
        **sizes, num_hidden_layers=1, vocab_size=30, max_position_embeddings=32
    )
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).eval()
    ids = torch.randint(0, 30, (2, 30))
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[0, 20:] = 0
    utils = sparse.SparseAttentionUtils
    wanted = model(ids, attention_mask=mask).logits
    whole = sparse.Dense(2, 8)
    utils.replace_model_self_attention_with_sparse_self_attention(model, 32, whole)
    found = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask == 1], wanted[mask == 1], rtol=0, atol=1e-5)
    utils.extend_position_embedding(model, 80)
    weight = model.bert.embeddings.position_embeddings.weight
    assert weight.shape == (80, 16)
    assert torch.equal(weight[64:], weight[:16])
    assert model(torch.randint(0, 30, (1, 77))).logits.shape == (1, 77, 30)
    rest, longer, seen, *_ = utils.pad_to_block_size(8, ids, mask, None, None, None, 0, None)
    assert (rest, longer.shape, seen[:, 30:].sum().item()) == (2, (2, 32), 0)
    assert utils.unpad_sequence_output(rest, longer).shape == (2, 30)


def test_deepspeeds_names_are_these_classes() -> None:
    from xds.deepspeed.ops.sparse_attention import FixedSparsityConfig, SparseSelfAttention
    from xds.deepspeed.ops.sparse_attention.sparsity_config import BigBirdSparsityConfig

    assert FixedSparsityConfig is sparse.Fixed
    assert SparseSelfAttention is sparse.SparseSelfAttention
    assert BigBirdSparsityConfig is sparse.BigBird
