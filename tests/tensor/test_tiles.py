"""Functions, MLPs and losses over tiles equal those over the whole sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import runs
import torch
from helpers import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds.deepspeed.runtime.sequence_parallel import ulysses_sp
from xds.tensor import run_in_tiles, tile_forward, tiled_loss, tiled_mlp
from xds.tensor.tiles.ranges import tile_ranges, tiles_for

VOCAB, WIDTH, LENGTH = 61, 24, 13  # odd: the last tile is shorter


class Mlp(nn.Module):
    """An MLP that uses one weight twice and one parameter never."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) + 0.1 * x @ self.up.weight[:WIDTH]


class Block(nn.Module):
    """Mixes tokens, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.cumsum(1) / LENGTH
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Embedding, blocks, a head that shares its weight. `tiles` is 0 for plain PyTorch."""

    def __init__(self, tiles: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embed.weight
        self.blocks[1].mlp.up.weight.requires_grad_(False)
        self.tiles = tiles

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        x, labels = self.norm(x), tokens[:, 1:]
        if self.tiles:
            weight, bias = self.head.weight, self.head.bias
            return tiled_loss(x, weight, labels, tiles=self.tiles, bias=bias, ignore_index=0)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=0)


def models(tiles: int) -> tuple[Model, Model]:
    """The same values in plain PyTorch and with tiles."""
    torch.manual_seed(3)
    plain = Model()
    tiled = copy.deepcopy(plain)
    tiled.tiles = tiles
    for block in tiled.blocks:
        tile_forward(block.mlp, -(-LENGTH // tiles))
    return plain, tiled


def batch(step: int, rank: int) -> Tensor:
    """[2, LENGTH + 1] tokens, the same number of labels other than 0 on each rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(1, VOCAB, (2, LENGTH + 1), generator=generator)
    tokens[:, 2:4] = 0
    return tokens


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_a_sequence_is_cut_as_torch_chunk_does():
    cuts = {(10, 4): [3, 3, 3, 1], (5, 4): [2, 2, 1], (3, 9): [1, 1, 1], (7, 1): [7]}
    for (length, tiles), sizes in cuts.items():
        ranges = tile_ranges(length, tiles)
        assert [size for _, size in ranges] == sizes
        assert sizes == [len(chunk) for chunk in torch.ones(length).chunk(tiles)]
        assert [start for start, _ in ranges] == [sum(sizes[:at]) for at in range(len(sizes))]
    assert tile_ranges(0, 3) == [(0, 0)]
    assert [tiles_for(at, 4) for at in (0, 1, 4, 5, 9)] == [1, 1, 1, 2, 3]


def grads_of(output, tensors):
    factor = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype)
    return torch.autograd.grad(output, tensors, factor, allow_unused=True)


def assert_same(ours, theirs, tolerance=1e-6):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("tiles", [1, 4, 50])
def test_an_mlp_in_tiles_equals_the_mlp(tiles):
    mlp = Mlp()
    mlp.down.bias.requires_grad_(False)
    x = torch.randn(11, 2, WIDTH, requires_grad=True).transpose(0, 1)  # not contiguous
    weights = [x, *(p for p in mlp.parameters() if p.requires_grad)]
    plain, tiled = mlp(x), tiled_mlp(mlp, x, tiles)
    assert_same([tiled], [plain])
    assert_same(grads_of(tiled, weights), grads_of(plain, weights), 2e-6)


def test_several_sequences_and_other_arguments_get_their_gradients():
    def scale(x, y, rows, options):  # two outputs, one of integers
        return {"a": x * y + rows["row"] * options + x @ weight, "b": (x.sum(-1) > 0).long()}

    weight = torch.randn(3, 3, requires_grad=True)
    x, row = torch.randn(2, 7, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    y = torch.randn(1, 7, 3, requires_grad=True)
    plain = scale(x, y, {"row": row}, 2.0)
    tensors = [x, y, row, weight]
    for weights in (None, [weight]):
        tiled = run_in_tiles(scale, [x, y], others=[{"row": row}, 2.0], tiles=3, weights=weights)
        assert torch.equal(tiled["b"], plain["b"]) and not tiled["b"].requires_grad
        same = scale(x, y, {"row": row}, 2.0)
        assert_same(grads_of(tiled["a"], tensors), grads_of(same["a"], tensors))


def test_an_input_without_gradient_and_a_frozen_model():
    mlp = Mlp()
    x = torch.randn(2, 5, WIDTH)
    weight = mlp.up.weight
    assert_same(grads_of(tiled_mlp(mlp, x, 2), [weight]), grads_of(mlp(x), [weight]))
    mlp.requires_grad_(False)
    assert not tiled_mlp(mlp, x, 2).requires_grad
    with torch.no_grad():
        assert torch.allclose(tiled_mlp(mlp, x, 2), mlp(x), atol=1e-6)


def test_each_weight_gets_one_gradient_and_its_hooks_run_once():
    mlp, seen, taken = Mlp(), [], []
    mlp.up.weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    mlp.up.weight.register_post_accumulate_grad_hook(lambda param: taken.append(param.grad.clone()))
    x = torch.randn(2, 9, WIDTH)
    tiled_mlp(mlp, x, 4).square().sum().backward()
    mlp.zero_grad()
    mlp(x).square().sum().backward()
    assert len(seen) == len(taken) == 2
    assert_same(taken[:1], taken[1:])


def test_dropout_draws_the_same_numbers_again_and_leaves_the_generator_as_plain_code_does():
    drop = nn.Dropout(0.5)
    x = torch.ones(2, 9, 4, requires_grad=True)
    output = run_in_tiles(drop, [x], tiles=4)
    torch.rand(7)  # drawn between forward and backward
    before = torch.get_rng_state()
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(grad, output.detach()) and grad.unique().tolist() == [0, 2]
    assert torch.equal(torch.get_rng_state(), before)


def test_autocast_is_the_same_in_backward_and_its_cache_stays_clean():
    mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(2, 9, 8, requires_grad=True)
    tensors = [x, *mlp.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        tiled = tiled_mlp(mlp, x, 3)
        plain = mlp(x)
    assert tiled.dtype == torch.bfloat16
    assert_same(grads_of(tiled, tensors), grads_of(plain, tensors), 0.02)


def test_sixteen_bit_gradients_are_summed_in_fp32():
    weight = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(1, 1000, 1, dtype=torch.bfloat16)
    output = run_in_tiles(lambda x: x @ weight, [x], tiles=1000, weights=[weight])
    (grad,) = torch.autograd.grad(output.sum(), weight)
    assert grad.dtype == torch.bfloat16 and grad.item() == 1000  # bf16 itself stops at 256


def test_a_gradient_that_autograd_gives_to_two_arguments_is_not_written():
    x = torch.randn(1, 6, 3)
    row, other = (torch.zeros(1, 2, 3, requires_grad=True) for _ in range(2))
    output = run_in_tiles(lambda x, row, other: x + row + other, [x], others=[row, other], tiles=3)
    factor = torch.arange(1.0, 19.0).view(1, 6, 3)
    for grad in torch.autograd.grad(output, [row, other], factor):
        assert torch.equal(grad, factor.view(3, 2, 3).sum(0, keepdim=True))


def test_checkpoints_around_tiles_and_tiles_around_checkpoints():
    from torch.utils.checkpoint import checkpoint

    mlp = Mlp()
    x = torch.randn(2, 9, WIDTH, requires_grad=True)
    tensors = [x, mlp.up.weight]
    want = grads_of(mlp(x), tensors)
    outside = checkpoint(tiled_mlp, mlp, x, 4, use_reentrant=False)
    assert_same(grads_of(outside, tensors), want, 2e-6)
    weights = mlp.parameters()
    inside = run_in_tiles(
        lambda x: checkpoint(mlp, x, use_reentrant=False), [x], tiles=4, weights=weights
    )
    assert_same(grads_of(inside, tensors), want, 2e-6)


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [(torch.float32, "mean"), (torch.bfloat16, "sum"), (torch.float16, "mean")],
)
def test_a_tiled_loss_equals_cross_entropy(dtype, reduction):
    hidden = torch.randn(2, 11, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 8, dtype=dtype, requires_grad=True)
    bias = torch.randn(50, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 50, (2, 11))
    labels[0, :6] = -100
    tensors = [hidden, weight, bias]
    scale = 2.0**16 if dtype == torch.float16 else 1.0  # of fp16 losses
    tiled = tiled_loss(hidden, weight, labels, tiles=5, bias=bias, reduction=reduction)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    logits = F.linear(*wide).flatten(0, 1)
    plain = F.cross_entropy(logits, labels.flatten(), reduction=reduction)
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    assert tiled.dtype == torch.float32
    assert abs(tiled.item() - plain.item()) <= tolerance * plain.item()
    share = 1.0 if reduction == "mean" else 2.0**-10  # sums of scaled gradients do not fit fp16
    found = torch.autograd.grad(tiled * scale * share, tensors)
    want = torch.autograd.grad(plain * scale * share, wide)
    for ours, theirs in zip(found, want, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_a_tiled_loss_of_many_tokens_in_16_bits_sums_its_bias_gradient_in_fp32():
    hidden, labels = torch.randn(4000, 8), torch.randint(0, 5, (4000,))
    weight, bias = torch.randn(5, 8), torch.randn(5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = tiled_loss(hidden, weight, labels, tiles=40, bias=bias, reduction="sum")
        logits = F.linear(hidden, weight, bias.detach())
    shares = logits.double().softmax(1) - F.one_hot(labels, 5)
    (grad,) = torch.autograd.grad(loss, bias)
    want = shares.sum(0)
    assert grad.dtype == torch.float32
    assert ((grad - want) / want).abs().max() <= 1e-5


def test_a_loss_without_labels_is_that_of_torch():
    hidden, weight = torch.randn(1, 4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    labels = torch.full((1, 4), -100)
    loss = tiled_loss(hidden, weight, labels, tiles=2)
    assert loss.isnan()
    for grad in torch.autograd.grad(loss, [hidden, weight]):
        assert not grad.any()
    with torch.no_grad():
        assert tiled_loss(hidden, weight, labels, tiles=2, reduction="sum") == 0


def test_a_module_runs_in_tiles_and_keeps_its_names():
    model = nn.Sequential(Mlp())
    names = list(model.state_dict())
    x = torch.randn(2, 9, WIDTH)
    want = grads_of(model(x), [model[0].up.weight])
    assert tile_forward(model[0], 4) is model[0]
    assert list(model.state_dict()) == names
    assert_same(grads_of(model(x), [model[0].up.weight]), want, 2e-6)
    with pytest.raises(xds.UsageError, match="tiles of 4 already"):
        tile_forward(model[0], 4)
    del model[0].forward
    assert model(x).grad_fn.name() != "_TiledBackward"


class WithResidual(nn.Module):
    """As the MLP of BLOOM, with a factor for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x, residual, *, factor, gate=None):
        return self.up(x) * (1 if gate is None else gate) * factor + residual


@pytest.mark.parametrize("is_gated", [False, True])
def test_further_inputs_of_a_module_are_cut_with_the_first(is_gated):
    module, factor = WithResidual(), torch.randn(4, requires_grad=True)
    x, residual, gate = (torch.randn(2, 7, 4, requires_grad=True) for _ in range(3))
    more = {"factor": factor, "gate": gate} if is_gated else {"factor": factor}
    used = [x, residual, *more.values(), *module.parameters()]
    plain = module(x, residual, **more)
    wanted = grads_of(plain, used)
    tiled = tile_forward(module, 3)(x, residual, **more)
    assert_same([tiled, *grads_of(tiled, used)], [plain, *wanted])


def test_mistakes_are_one_sentence():
    x = torch.randn(2, 4, 3, requires_grad=True)
    linear = nn.Linear(3, 3)
    with pytest.raises(xds.UsageError, match="tiles=0"):
        tiled_mlp(linear, x, 0)
    with pytest.raises(xds.UsageError, match="one number of tokens in dimension 1"):
        run_in_tiles(torch.add, [x, x[:, :2]], tiles=2)
    output = run_in_tiles(lambda x: linear(x), [x], tiles=2, weights=[linear.weight])
    with pytest.raises(xds.UsageError, match=r"shape \(3,\) that needs a gradient"):
        output.sum().backward()
    with pytest.raises(xds.UsageError, match="one label for each token"):
        tiled_loss(x, linear.weight, torch.zeros(2, 3, dtype=torch.long), tiles=2)
    with pytest.raises(xds.UsageError, match='pass "mean" or "sum"'):
        tiled_loss(x, linear.weight, torch.zeros(2, 4, dtype=torch.long), tiles=2, reduction="none")
    loss = tiled_loss(x, linear.weight, torch.zeros(2, 4, dtype=torch.long), tiles=2)
    loss.backward(retain_graph=True)
    with pytest.raises(xds.UsageError, match="call tiled_loss again"):
        loss.backward()


# -- DeepSpeed's names -------------------------------------------------------------------------------------


def test_deepspeeds_functions_equal_the_plain_ones():
    head = nn.Linear(6, 20)
    params = list(head.parameters())
    x = torch.randn(2, 8, 6, requires_grad=True)
    y = torch.randint(0, 20, (2, 8))

    def loss(self, x, y, mask=None):
        found = F.cross_entropy(self(x).flatten(0, -2), y.flatten(), reduction="none")
        return (found if mask is None else found * mask.flatten()).mean()

    tensors = [x, *head.parameters()]
    mask = torch.rand(2, 8)
    for given in (None, mask):
        tiled = ulysses_sp.TiledFusedLogitsLoss.apply(loss, head, x, y, given, 4, params, "mean")
        plain = loss(head, x, y, given)
        assert_same([tiled], [plain])
        found = torch.autograd.grad(tiled, tensors)
        assert_same(found, torch.autograd.grad(plain, tensors), 1e-5)
    output = ulysses_sp.TiledMLP.apply(lambda self, x: self(x), head, x, 3, params)
    assert_same(grads_of(output, tensors), grads_of(head(x), tensors), 2e-6)


# -- engines ---------------------------------------------------------------------------------------------


def gathered_in_backward() -> tuple[list[list[str]], list[list[str]]]:
    """The units that are gathered when backward reaches each block's norm: in plain code, and in tiles."""
    found = []
    for model in models(4):
        for block in model.blocks:
            del block.mlp.unused  # a gradient that never comes keeps its unit gathered
            block.mlp.up.weight.requires_grad_(True)
        engine = xds.initialize(model, _config(3, "Block", max_reuse_distance=0))
        loss = engine(batch(0, 0))
        seen: list[list[str]] = []

        def read(*_: object, engine: Any = engine, seen: list[list[str]] = seen) -> None:
            units = engine._sharded.units
            seen.append([u.name for u in units if any(flat.is_unsharded for flat in u.params)])

        for block in model.blocks:
            block.norm.weight.register_hook(read)
        engine.backward(loss)
        engine.destroy()
        found.append(seen)
    return found[0], found[1]


def _config(stage: int, units: str = "blocks.*", **zero: Any) -> dict[str, Any]:
    zero |= {"units": [units], "stage3_prefetch_bucket_size": 0}
    return runs.config(stage, params={"weight_decay": 0.0}, zero=zero)


def test_units_are_dropped_in_backward_as_in_plain_code():
    for plain, tiled in run_ranks(gathered_in_backward, 2):
        assert tiled == plain
        assert len(plain) == 3 and len(plain[-1]) < 4


def test_copies_run_their_own_weights():
    first = tile_forward(Mlp(), 4)
    second = copy.deepcopy(first)
    nn.init.zeros_(second.down.weight)
    assert second.forward._module is second
    x = torch.randn(1, 6, WIDTH)
    assert not torch.equal(first(x), second(x))
