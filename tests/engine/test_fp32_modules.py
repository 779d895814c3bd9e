"""Modules that stay fp32 in 16-bit training equal plain PyTorch with the same casts around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config, differing
from torch import Tensor, nn
from torch.nn import functional as F

import xds

WIDTH, EXPERTS, VOCAB = 16, 4, 40
KEPT = ["gate", "LayerNorm", "head"]
LOW = torch.bfloat16
UPDATES: dict[str, dict[str, float]] = {"SGD": {"lr": 0.1}, "AdamW": {"lr": 1e-2, "eps": 1e-3}}
Wrap = Callable[[nn.Module], nn.Module]


class Mixture(nn.Module):
    """A residual block with a router and experts. fp32: what puts a module into fp32."""

    def __init__(self, fp32: Wrap) -> None:
        super().__init__()
        self.norm = fp32(nn.LayerNorm(WIDTH))
        self.gate = fp32(nn.Linear(WIDTH, EXPERTS, bias=False))
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        weights = F.softmax(self.gate(hidden).float(), -1).to(x.dtype)
        parts = [weights[..., i : i + 1] * expert(hidden) for i, expert in enumerate(self.experts)]
        return x + torch.stack(parts).sum(0)


class Model(nn.Module):
    """Written for any one dtype. The head is shared with the embedding, which has no floating input."""

    def __init__(self, fp32: Wrap = lambda module: module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.embed, self.head = fp32(self.embed), fp32(self.head)
        self.blocks = nn.ModuleList([Mixture(fp32) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class InFp32(nn.Module):
    """What a user of plain torch writes around a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.float() if x.dtype == LOW else x).to(LOW)


def build(fp32: Wrap = lambda module: module) -> nn.Module:
    torch.manual_seed(5)
    return Model(fp32)


def batch(step: int, part: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 * step + part)
    return torch.randint(VOCAB, (2, 6), generator=draw)


class Step(NamedTuple):
    """What a step showed."""

    loss: float
    norm: float
    grads: dict[str, Tensor]


class Reference:
    """Plain torch: 16-bit parameters with fp32 masters, and modules that are fp32 themselves."""

    def __init__(self, optimizer: str, clip: float = float("inf")) -> None:
        self.model, self.clip = build(InFp32), clip
        wrapped = [module for module in self.model.modules() if isinstance(module, InFp32)]
        kept = {id(param) for module in wrapped for param in module.parameters()}
        self.params, self.masters = dict(self.model.named_parameters()), {}
        for name, param in self.params.items():
            param.data = param.data if id(param) in kept else param.data.to(LOW)
            self.masters[name] = param.detach().float().clone()
        make = getattr(torch.optim, optimizer)
        self.updates = make(list(self.masters.values()), **UPDATES[optimizer])

    def step(self, parts: Sequence[Tensor]) -> Step:
        grads = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        total = 0.0
        for part in parts:
            loss = self.model(part)
            loss.backward()
            total += loss.item()
            for name, param in self.params.items():
                assert param.grad is not None
                grads[name] += param.grad.float()
                param.grad = None
        for name, master in self.masters.items():
            grads[name] /= len(parts)
            master.grad = grads[name].clone()
        norm = nn.utils.clip_grad_norm_(list(self.masters.values()), self.clip)
        self.updates.step()
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(self.masters[name])
        return Step(total / len(parts), norm.item(), _plain_names(grads))

    def values(self) -> dict[str, Tensor]:
        return _plain_names({**self.masters, "head.weight": self.masters["embed.module.weight"]})


def _plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(".module", ""): tensor for name, tensor in tensors.items()}


Trained = tuple[list[tuple[float, float]], dict[str, Tensor], list[dict[str, Tensor]]]


def trained(
    stage: int, kept: Any, optimizer: str, accumulation: int, more: dict[str, Any]
) -> Trained:
    """Loss and norm of each step; the masters at the end; on one rank, the gradients of each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    types = {"keep_in_fp32_modules": kept, **more.pop("data_types", {})}
    params = UPDATES[optimizer]
    given = config(
        stage,
        "bf16",
        accumulation=accumulation,
        optimizer=optimizer,
        params=params,
        data_types=types,
        **more,
    )
    # torch's own class has the arithmetic of the reference
    own = partial(getattr(torch.optim, optimizer), **params)
    engine = xds.initialize(build(), given, optimizer=own)
    steps, grads = [], []
    for step in range(3):
        for micro_step in range(accumulation):
            engine.backward(engine(batch(step, micro_step * ranks + rank)))
            if micro_step == accumulation - 1 and ranks == 1:
                named = engine.module.named_parameters()
                grads.append({name: xds.zero.get_full_grad(p).clone() for name, p in named})
            engine.step()
        steps.append((engine.mean_loss(), engine.get_global_grad_norm()))
    values = engine.full_state_dict(full_precision=True)
    engine.destroy()
    return steps, values, grads


@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.quick("AdamW")
def test_one_rank_has_the_bits_of_plain_torch(optimizer: str) -> None:
    """Also where blocks run again in backward, and where they are compiled."""
    plain = Reference(optimizer)
    expected = [plain.step([batch(step, 0), batch(step, 1)]) for step in range(3)]
    again = {"activation_checkpointing": {"enabled": True}}
    graphs = {"compile": {"enabled": True, "backend": "aot_eager"}}
    for more in ({}, again, {**again, **graphs}):
        [(steps, values, grads)] = run_ranks(trained, 1, 0, KEPT, optimizer, 2, dict(more))
        for (loss, norm), step in zip(steps, expected, strict=True):
            assert loss == step.loss and norm == pytest.approx(step.norm, rel=1e-6), more
        for found, step in zip(grads, expected, strict=True):
            assert not differing(found, step.grads), more
        assert not differing(values, plain.values()), more


CPU = {"device": "cpu"}


def several(optimizer: str) -> list[Trained]:
    sent = {"communication_data_type": "fp32", "gradient_clipping": 0.5}
    places = [(stage, {}) for stage in range(4)]
    places += [
        (2, {"offload_optimizer": CPU}),
        (3, {"offload_optimizer": CPU, "offload_param": CPU}),
    ]
    return [trained(stage, KEPT, optimizer, 2, {"zero": zero, **sent}) for stage, zero in places]


@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.quick("SGD")
def test_several_ranks_clip_and_offload_as_plain_torch(optimizer: str) -> None:
    plain = Reference(optimizer, clip=0.5)
    parts = [[batch(step, part) for part in range(4)] for step in range(3)]
    expected = [plain.step(each) for each in parts]
    for steps, values, _ in run_ranks(several, 2, optimizer)[0]:
        for (loss, norm), step in zip(steps, expected, strict=True):
            assert (loss, norm) == pytest.approx((step.loss, step.norm), rel=1e-6)
        assert not differing(values, plain.values(), atol=1e-6)


def held(stage: int) -> tuple[dict[str, int], dict[torch.dtype, int], int]:
    """Bytes of states after a step; elements of the flat buffers by dtype; bytes as the start says them."""
    types = {"keep_in_fp32_modules": KEPT, "grad_accum_dtype": "bf16"}
    engine = xds.initialize(build(), config(stage, "bf16", data_types=types))
    engine.backward(engine(batch(0, 0)))
    engine.step()
    numel: dict[torch.dtype, int] = {}
    for flat in (flat for unit in engine._sharded.units for flat in unit.params):
        numel[flat.dtype] = numel.get(flat.dtype, 0) + flat.layout.numel
    expected_bytes, _ = engine._sharded.memory.expected_bytes(num_states=2)
    plan = engine.memory_plan()
    engine.destroy()
    return plan, numel, expected_bytes


def test_what_stays_fp32_has_no_master_and_fp32_sums() -> None:
    for stage in range(4):
        [(plan, numel, expected_bytes), _] = run_ranks(held, 2, stage)
        low, wide = numel[LOW], numel[torch.float32]
        params, grads, states = (1 if stage < least else 2 for least in (3, 2, 1))
        assert plan["param"] == (2 * low + 4 * wide) // params
        assert plan["master"] == 2 * low // states
        # sums of 16 bits, as the config says; those of the modules are fp32
        sums = (2 * low + 4 * wide) // grads
        assert expected_bytes == plan["param"] + plan["master"] + 8 * (low + wide) // states + sums


def resumed(folder: str, before: list[str], after: list[str]) -> list[dict[str, Tensor]]:
    """The masters that a checkpoint has, and those of an engine that keeps other modules in fp32."""
    found = []
    for stage, kept in ((1, before), (3, after)):
        given = config(stage, "bf16", data_types={"keep_in_fp32_modules": kept})
        engine = xds.initialize(build(), given)
        if kept is before:
            engine.backward(engine(batch(0, dist.get_rank())))
            engine.step()
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        found.append(engine.full_state_dict(full_precision=True))
        engine.backward(engine(batch(1, dist.get_rank())))
        engine.step()
        low = engine.full_state_dict(rank0_only=False)
        assert (low["blocks.0.gate.weight"].dtype == torch.float32) is bool(kept)
        engine.destroy()
    return found


def test_a_checkpoint_loads_where_other_modules_are_fp32(tmp_path: Path) -> None:
    for name, before, after in (("on", [], KEPT), ("off", KEPT, [])):
        saved, loaded = run_ranks(resumed, 2, str(tmp_path / name), before, after)[0]
        assert not differing(loaded, saved)


class Kinds(nn.Module):
    """Modules that show the dtype of what they get and give."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.head = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> dict[str, torch.dtype]:
        hidden = self.norm(self.first(x))
        outputs = {
            "hidden": hidden,
            "head": self.head(hidden),
            "router": self.router(hidden.float()),
        }
        return {name: output.dtype for name, output in outputs.items()}


def kinds(types: dict[str, Any]) -> tuple[dict[str, torch.dtype], set[str]]:
    """The dtypes of the outputs, and the names of what is fp32."""
    engine = xds.initialize(Kinds(), config(0, "bf16", data_types=types))
    found = engine(torch.ones(2, WIDTH, dtype=LOW))
    tensors = engine.module.state_dict().items()
    wide = {name for name, tensor in tensors if tensor.dtype == torch.float32}
    engine.destroy()
    return found, wide


def test_outputs_have_the_dtype_of_the_inputs_unless_the_config_says_fp32() -> None:
    kept = ["BatchNorm1d", "router", "head"]
    found, wide = kinds({"keep_in_fp32_modules": kept})
    assert found == {"hidden": LOW, "head": LOW, "router": torch.float32}
    assert wide == {
        *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
        *("router.weight", "router.bias", "head.weight", "head.bias"),
    }
    found, _ = kinds({"keep_in_fp32_modules": kept, "fp32_outputs": ["head"]})
    assert found == {"hidden": LOW, "head": torch.float32, "router": torch.float32}


def test_a_model_that_stays_fp32_as_a_whole_has_fp32_outputs() -> None:
    engine = xds.initialize(
        nn.Linear(2, 1), config(0, "bf16", data_types={"keep_in_fp32_modules": ["*"]})
    )
    assert engine(torch.ones(2, 2, dtype=LOW)).dtype == torch.float32
    engine.destroy()


@pytest.mark.parametrize(
    ("types", "says"),
    [
        (
            {"keep_in_fp32_modules": ["norms"]},
            r"\['norms'\]: no parameter or buffer has a name with this",
        ),
        ({"keep_in_fp32_modules": ["head.bias"]}, "head.bias stays fp32 and head.weight does not"),
        (
            {"keep_in_fp32_modules": ["norm"], "fp32_outputs": ["head"]},
            "fp32_outputs = \\['head'\\]: no parameter that data_types.keep_in_fp32_modules names",
        ),
    ],
)
def test_names_that_cannot_be_followed_are_refused(types: dict[str, Any], says: str) -> None:
    with pytest.raises(xds.UsageError, match=says):
        kinds(types)


def wide_params(folder: str, kind: str, low: torch.dtype) -> tuple[set[str], set[str]]:
    """What transformers loads as fp32, and what is fp32 in an engine."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    load: Any = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    model = load.from_pretrained(folder, dtype=low)
    precision = "bf16" if low == LOW else "fp16"
    made = load.from_config(model.config, dtype=torch.float32)
    engine = xds.initialize(
        made, config(1, precision, data_types={"keep_in_fp32_modules": ["auto"]})
    )
    found = tuple(
        {name for name, p in each.named_parameters() if p.dtype == torch.float32}
        for each in (model, engine.module)
    )
    tokens = torch.arange(8).view(1, 8)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.destroy()
    return found  # type: ignore[return-value]


def test_auto_is_what_transformers_keeps_in_fp32(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    moe = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8}
    moe |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    moe |= {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0}
    for kind, low, sizes in (("t5", torch.float16, t5), ("ernie4_5_moe", LOW, moe)):
        made = transformers.AutoConfig.for_model(kind, vocab_size=32, **sizes)
        if kind == "t5":
            made.decoder_start_token_id = 0
            model = transformers.AutoModelForSeq2SeqLM.from_config(made)
        else:
            model = transformers.AutoModelForCausalLM.from_config(made)
        folder = tmp_path / kind
        model.save_pretrained(folder)
        [(expected, found)] = run_ranks(wide_params, 1, str(folder), kind, low)
        assert found == expected and found, kind
