"""The first forward proves a plan: what slices compute otherwise is one sentence on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import runs
import torch
from helpers import run_ranks
from pipeline_runs import SAME
from tensor_cases import Case, batches, build
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds.tensor.plan import plan_of_model
from xds.tensor.regions import layers_in, regions
from xds.tensor.styles import ParallelStyle, StyleName

WIDTH, HEADS = 64, 4


def config_of(plan: dict[str, str] | None = None, stage: int = 1, **more: Any) -> dict[str, Any]:
    section = {"tp_size": 2} | ({"plan": plan} if plan else {})
    return runs.config(stage, params={"eps": 1e-3}, tensor_parallel=section, **more)


def outcome(model: nn.Module, config: dict[str, Any], **inputs: Any) -> str:
    """What a step in two slices raises; "" where it comes through."""
    engine = xds.initialize(model, config)
    spoil(model)
    try:
        found = engine(**inputs)
        engine.backward(getattr(found, "loss", found))
        engine.step()
    except xds.UsageError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


# -- in every precision -------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention that may cut what it has into a fixed number of heads: a slice of it gets narrower heads."""

    def __init__(self, *, is_right: bool) -> None:
        super().__init__()
        self.is_right, self.stays_right = True, is_right
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, WIDTH // HEADS) if self.is_right else (HEADS, -1)
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, shape).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


def spoil(model: nn.Module) -> None:
    """Only after the plan was found: what cannot run in slices is not cut."""
    for module in model.modules():
        if isinstance(module, Block):
            module.is_right = module.stays_right


class Needs16Bits(Block):
    """As with kernels that take 16 bits alone."""

    is_found = False  # the plan

    def forward(self, x: Tensor) -> Tensor:
        if Needs16Bits.is_found and x.dtype is not torch.bfloat16:
            raise RuntimeError("only bf16")
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, std: float, *, is_right: bool, kind: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(kind(is_right=is_right) for _ in range(2))
        for param in self.blocks.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
PRECISIONS: list[tuple[str, float]] = [
    *(("fp32", 0.02), ("fp32", 0.0), ("fp64", 1e-4), ("bf16", 0.02), ("bf16", 1e-4), ("fp16", 0.0)),
    *(("autocast", 1e-4), ("autocast", 0.02)),
]


def in_a_precision(precision: str, std: float, is_right: bool) -> str:
    model = Net(std, is_right=is_right)
    more = AUTOCAST if precision == "autocast" else {}
    if precision == "fp64":
        model.double()
    config = config_of(**more) | runs.PRECISIONS.get(precision, {})
    return outcome(model, config, ids=torch.arange(18).view(2, 9))


def in_every_precision() -> list[tuple[str, str]]:
    return [tuple(in_a_precision(*one, right) for right in (True, False)) for one in PRECISIONS]


def test_a_small_difference_is_found_in_every_precision() -> None:
    for found in run_ranks(in_every_precision, 2):
        for case, (right, wrong) in zip(PRECISIONS, found, strict=True):
            assert right == "", (case, right)
            assert "blocks.0 computes something else in 2 slices" in wrong, case


def in_16_bits_alone(is_right: bool) -> str:
    model = Net(0.02, is_right=is_right, kind=Needs16Bits)
    engine = xds.initialize(model, config_of() | runs.PRECISIONS["bf16"])
    spoil(model)
    Needs16Bits.is_found = True
    try:
        engine(torch.arange(18).view(2, 9))
    except xds.UsageError as error:
        return str(error)
    finally:
        Needs16Bits.is_found = False
        engine.destroy()
    return ""


def test_a_block_that_needs_16_bits_is_proven_in_them() -> None:
    assert run_ranks(in_16_bits_alone, 2, True) == ["", ""]
    assert all("something else" in text for text in run_ranks(in_16_bits_alone, 2, False))


# -- what is cut outside of blocks, and blocks that are cut otherwise ---------------------------------------

WAYS = {
    "columns": ParallelStyle(StyleName.COLWISE),
    "rows": ParallelStyle(StyleName.ROWWISE),
    "gather": ParallelStyle(StyleName.COLWISE_GATHER),
    "split": ParallelStyle(StyleName.ROWWISE_SPLIT),
    "norm": ParallelStyle(StyleName.PARTIAL),
    "embed": ParallelStyle(StyleName.EMBEDDING),
}
REGIONS: list[tuple[dict[str, str], list[str]]] = [
    ({"blocks.0.up": "columns", "blocks.0.down": "rows"}, []),
    ({"embed": "embed", "head": "gather", "a.b": "split"}, []),
    ({"a.up": "columns", "a.down": "rows", "b.c.up": "columns", "b.d.down": "rows"}, ["a", "b"]),
    ({"a.up": "columns", "b.down": "rows"}, [""]),
    ({"a.up": "columns"}, ["a"]),
    ({"up": "columns", "a.up": "columns", "a.down": "rows"}, [""]),
    ({"blocks.0": "columns", "blocks.1": "rows"}, ["blocks"]),  # layers that are blocks
    ({"blocks.0.up": "columns", "norm": "norm"}, [""]),
    ({"a.b.up": "columns", "a.b.down": "rows", "a.c": "rows", "a.d": "columns"}, ["a"]),
]


def test_a_region_is_the_smallest_module_around_what_is_cut() -> None:
    for cut, wanted in REGIONS:
        ways = {name: WAYS[word] for name, word in cut.items()}
        assert regions(ways, ["blocks.0", "blocks.1"]) == wanted, cut
    ways = {"a.b": WAYS["rows"], "ab.c": WAYS["columns"], "a": WAYS["rows"]}
    assert layers_in("a", ways) == {"b": WAYS["rows"]}
    assert layers_in("", ways) == ways


class Projector(nn.Module):
    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self.up, self.down, self.is_right = nn.Linear(8, 16), nn.Linear(16, 8), is_right

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(x.tanh() if self.is_right else F.normalize(x, dim=-1))


class Model(nn.Module):
    """The normalisation needs all columns: a slice computes something else without an error."""

    def __init__(self, kind: str, is_right: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        if kind == "module":
            self.projector = Projector(is_right)
        self.blocks = nn.ModuleList(Projector(True) for _ in range(2))
        if kind in ("second block", "same cut"):
            self.blocks[1].is_right = is_right
        if kind == "root":
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.is_right = is_right

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "module":
            x = self.projector(x)
        if self.kind == "root":
            x = Projector.forward(self, x)  # type: ignore[arg-type]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


PLANS = {
    "module": ({"projector.up": "colwise", "projector.down": "rowwise"}, 3),
    "root": ({"up": "colwise", "down": "rowwise"}, 2),
    "same cut": ({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, 1),
    "second block": (
        {
            "blocks.0.up": "colwise_gather_output",
            "blocks.1.up": "colwise",
            "blocks.1.down": "rowwise",
        },
        3,
    ),
}


def of_every_kind() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    for kind, (plan, stage) in PLANS.items():
        engine = xds.initialize(Model(kind, True), config_of(plan, stage, samples=3))
        assert engine(x).item() == pytest.approx(Model(kind, True)(x).item(), abs=1e-6), kind
        engine.destroy()
        text = outcome(Model(kind, False), config_of(plan, stage, samples=3), x=x)
        assert "something else in 2 slices than whole: the output of down differs" in text, kind


def test_a_right_plan_trains_and_a_wrong_one_is_refused() -> None:
    run_ranks(of_every_kind, 2)


# -- small models -------------------------------------------------------------------------------------------


class OfHeads(nn.Module):
    """`inner` works on what is cut. Before `down` is trained it gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 16), nn.Linear(4, 4), nn.Linear(16, 8)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(self.up(x).view(len(x), -1, 4)).flatten(1))


BY_NUMBER = {"*.up": "colwise", "*.down": "rowwise"}


def hidden_by_zeros(word: str) -> str:
    torch.manual_seed(0)
    engine = xds.initialize(
        nn.Sequential(OfHeads(), OfHeads()), config_of(BY_NUMBER | {"*.inner": word})
    )
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    try:
        for _ in range(3):
            engine.backward(engine(x).square().mean())
            engine.step()
    except xds.UsageError as error:
        return f"{engine.global_steps}: {error}"
    return ""


def test_what_zeros_hide_is_found_in_the_first_forward() -> None:
    for text in run_ranks(hidden_by_zeros, 2, "replicate"):
        assert text.startswith("0: ") and "the gradient of inner.weight differs" in text
    assert run_ranks(hidden_by_zeros, 2, "replicated_with_grad_allreduce") == ["", ""]


class Odd(nn.Module):
    """A block with a buffer that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.down(self.up(x).view(len(x), 2, -1).tanh().flatten(1))


def odd_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Odd(), Odd())


def odd_batches() -> None:
    engine = xds.initialize(odd_model(), config_of(BY_NUMBER))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    assert engine(x * float("nan")).isnan().all()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        engine(x[:, :5])
    assert not isinstance(caught.value, xds.XdsError)
    torch.testing.assert_close(engine(x), odd_model()(x), rtol=0, atol=1e-6)
    assert engine.module[0].count in (2, 3)  # the second batch ends before the count
    engine.destroy()
    models = [odd_model(), odd_model()]
    for model in models:
        model[1].up.weight = model[0].up.weight  # type: ignore[union-attr]
    engine = xds.initialize(models[1], config_of(BY_NUMBER | {"0.down": "rowwise"}))
    torch.testing.assert_close(engine(x), models[0](x), rtol=0, atol=1e-6)  # both stay whole
    engine.destroy()


def test_batches_at_fault_buffers_and_shared_weights_are_not_the_plans_fault() -> None:
    run_ranks(odd_batches, 2)


class Normed(torch.optim.Optimizer):
    """It uses norms of whole parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


class Mlps(nn.Module):
    """Packed gate and up, in blocks whose slices have fitting shapes in a wrong plan, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.packed, self.down = nn.LayerNorm(10), nn.Linear(10, 24), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.packed(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


PACKED = {"blocks.*.packed": "packed_colwise", "blocks.*.down": "rowwise"}
NOT_PACKED = {"blocks.*.packed": "colwise", "blocks.*.down": "rowwise"}


def refused() -> None:
    def is_refused(text: str, model: nn.Module, plan: dict[str, str], **given: Any) -> None:
        with pytest.raises(xds.UsageError, match=text):
            xds.initialize(model, config_of(plan), **given)

    model = odd_model()
    nn.utils.parametrizations.weight_norm(model[0].up)  # type: ignore[union-attr,arg-type]
    is_refused("the weight of 0.up is computed from other parameters", model, BY_NUMBER)
    model = odd_model()
    model[0].up = nn.Sequential(model[0].up)  # type: ignore[union-attr]
    is_refused("write a plan with 0.up.0 instead", model, BY_NUMBER)
    text = "Normed: this optimizer may use norms or the shape of a whole parameter"
    is_refused(text, odd_model(), BY_NUMBER, optimizer=Normed)
    is_refused("matches no module", Mlps(), {"blocks.*.up": "colwise"})
    is_refused("must be one of", Mlps(), {"blocks.*.down": "columnwise"})
    is_refused("only linear layers", Mlps(), {"blocks.*.norm": "colwise"})
    engine = xds.initialize(Mlps(), config_of(PACKED))
    for is_training, remedy in ((True, "let the sampler use"), (False, "with one seed")):
        engine.train(is_training)
        with pytest.raises(xds.UsageError, match=f"different batches.*{remedy}"):
            engine(torch.full((4, 10), float(engine.global_rank)))
    engine.destroy()
    is_refused("build the model again", engine.module, PACKED)
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    for samples in (x, x[:1].expand(4, -1)):
        said = outcome(Mlps(), config_of(NOT_PACKED, 3), x=samples)
        assert "blocks.0 computes something else in 2 slices than whole" in said
        assert "the output of down differs" in said


def test_what_slices_cannot_do_is_one_sentence_on_every_rank() -> None:
    run_ranks(refused, 2)


# -- models of transformers ---------------------------------------------------------------------------------


def of_transformers() -> list[str]:
    """Logits that are not gathered, norms that are not summed, a block after one that has filled a cache."""
    said = []
    for name in ("llama", "qwen3", "cached"):
        model: Any = build("qwen3" if name == "qwen3" else "llama", layers=2)
        plan = plan_of_model(model)
        if name == "llama":
            plan |= {"lm_head": "colwise"}
        elif name == "qwen3":
            plan = {key: word for key, word in plan.items() if "_norm" not in key}
        else:
            model.config.use_cache = True
            plan |= {"model.layers.1.input_layernorm": "replicated_with_grad_allreduce"}
        said.append(outcome(model, config_of(plan), **next(batches("llama", 0, 0))))
    return said


def test_wrong_plans_of_models_of_transformers_are_found() -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    for head, norms, cached in run_ranks(of_transformers, 2):
        assert "the model cannot run in 2 slices: Expected input batch_size" in head
        assert "the gradient of self_attn.q_norm.weight differs" in norms
        assert "model.layers.1 computes something else" in cached


def not_refused() -> None:
    """Gradients that are zero but for rounding, and fp64 with norms in fp32."""
    for name in ("rounding", "fp64"):
        model = build("llama" if name == "rounding" else "qwen3", layers=2)
        ids = torch.full((2, 48), 5)
        if name == "rounding":
            for key, param in model.named_parameters():
                param.requires_grad_("q_proj" in key or "k_proj" in key)
        else:
            model.double()
            ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
        wanted = model(input_ids=ids, labels=ids).loss.item()
        engine = xds.initialize(model, config_of())
        assert engine(input_ids=ids, labels=ids).loss.item() == pytest.approx(wanted, rel=SAME)
        engine.destroy()


def test_rounding_is_not_refused() -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    run_ranks(not_refused, 2)


def step_of(stage: int, how: str, size: int) -> tuple[float, Tensor, Tensor]:
    """The loss, and two weights after a step of SGD: `up`, and the norm before it."""
    model = build("llama", layers=2)
    layer: Any = model.get_submodule("model.layers.0")
    up, norm = layer.mlp.up_proj.weight, layer.post_attention_layernorm.weight
    if how == "hook before":
        up.register_hook(lambda grad: grad * 0.5)
    section = {"tensor_parallel": {"tp_size": size}}
    engine = xds.initialize(
        model, runs.config(stage, optimizer="SGD", params={"lr": 1.0}, **section)
    )
    if how == "hook after":
        up.register_hook(lambda grad: grad * 0.5)
    elif how == "freeze":
        norm.requires_grad_(False)
    engine.backward(loss := engine(**next(batches("llama", 0, 0))).loss)
    engine.step()
    found = [xds.zero.get_full_param(param) for param in (up, norm)]
    engine.destroy()
    return loss.item(), found[0], found[1]


def test_hooks_and_frozen_parameters_are_those_of_the_script() -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    for how, stage in (("hook before", 1), ("hook after", 3), ("hook after", 0), ("freeze", 3)):
        ((loss, up, norm),) = run_ranks(step_of, 1, stage, how, 1)
        for found in run_ranks(step_of, 2, stage, how, 2):
            assert found[0] == pytest.approx(loss, rel=1e-5), how
            torch.testing.assert_close(found[1], up, rtol=0, atol=1e-6)
            torch.testing.assert_close(found[2], norm, rtol=0, atol=1e-6)


def compiled_with_inputs_on_the_host() -> list[float]:
    """Losses of two engines: the second one has other groups."""
    losses = []
    config = Case("llama", 1, 1, 2, 1, 0).config() | {
        "compile": {"enabled": True, "backend": "aot_eager"},
        "activation_checkpointing": {"enabled": True, "cpu_checkpointing": True},
    }
    for _ in range(2):
        engine = xds.initialize(build("llama"), config)
        losses.append(engine.train_batch(batches("llama", 0, 0)).item())
        engine.destroy()
    return losses


@pytest.mark.slow
def test_compiled_blocks_are_recomputed_by_the_same_graph() -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    for first, second in run_ranks(compiled_with_inputs_on_the_host, 2):
        assert first == pytest.approx(second, rel=1e-6)
