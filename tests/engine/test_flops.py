"""The profiler: what products count, work and time of each module, which steps are profiled."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_ranks
from runs import config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

import xds
from xds.engine.profiling import units
from xds.engine.profiling.clock import ProfileClock
from xds.engine.profiling.counter import OperationCounter, Tally, known_formulas
from xds.engine.profiling.profile import ModuleProfile, Profile
from xds.engine.profiling.recorder import Recorder
from xds.engine.profiling.text import Detail, Setting, report, tree


def r(*shape: int, **how: Any) -> Tensor:
    return torch.rand(*shape, **how)


def counted(call: Callable[[], Any]) -> int:
    """FLOPs of a call."""
    tally = Tally()
    with OperationCounter(tally):
        call()
    return tally.flops


OFFSETS = torch.tensor([3, 8], dtype=torch.int32)
Q, KV = r(2, 4, 16, 8), r(2, 2, 16, 8)  # grouped: two heads of queries for one of keys

# call, MACs
TABLE: dict[str, tuple[Callable[[], Any], int]] = {
    "mm": (lambda: r(4, 8) @ r(8, 5), 160),
    "dot": (lambda: r(8) @ r(8), 8),
    "bmm": (lambda: r(2, 1, 4, 8) @ r(3, 8, 5), 960),
    "linear": (lambda: F.linear(r(3, 4, 8), r(5, 8)), 480),
    "addmm": (lambda: torch.addmm(r(1), r(4, 8), r(8, 5)), 160),
    "addbmm": (lambda: torch.addbmm(r(5), r(2, 4, 8), r(2, 8, 5)), 320),
    "einsum": (lambda: torch.einsum("bij,bjk->bik", r(2, 3, 4), r(2, 4, 5)), 120),
    "grouped": (lambda: F.grouped_mm(r(8, 16), r(2, 16, 16), offs=OFFSETS), 2048),
    "conv": (lambda: F.conv2d(r(2, 4, 8, 8), r(6, 4, 3, 3), r(6)), 2 * 36 * 6 * 36),
    "conv, groups": (lambda: F.conv2d(r(2, 4, 8, 8), r(6, 2, 3, 3), groups=2), 2 * 36 * 108),
    "conv transposed": (
        lambda: F.conv_transpose2d(r(2, 4, 8, 8), r(4, 3, 3, 3), r(3), stride=2),
        2 * 64 * 108,
    ),
    "attention": (lambda: F.scaled_dot_product_attention(Q, Q, Q), 32768),
    "attention, grouped": (
        lambda: F.scaled_dot_product_attention(Q, KV, KV, enable_gqa=True),
        32768,
    ),
    "lstm": (lambda: nn.LSTM(8, 16, 2)(r(5, 2, 8)), 10 * 64 * (8 + 16 + 16 + 16)),
    "element-wise": (lambda: F.gelu(r(4, 1, 7) + r(1, 5, 7)).softmax(-1).sum(), 0),
    "norm": (lambda: F.layer_norm(r(4, 7), (7,), r(7), r(7)), 0),
    "embedding": (lambda: F.embedding(torch.tensor([1, 2]), r(4, 7)), 0),
}


def test_an_operation_counts() -> None:
    for name, (call, macs) in TABLE.items():
        for inference in (False, True):
            with torch.inference_mode(inference):
                assert counted(call) == 2 * macs, (name, inference)


@pytest.mark.parametrize(
    "name, make, times",
    [
        ("linear", lambda x: F.linear(x, r(5, 8, requires_grad=True)), 2),
        ("data", lambda x: F.linear(x.detach(), r(5, 8, requires_grad=True)), 1),
        ("conv", lambda x: F.conv1d(x[None], r(5, 4, 3, requires_grad=True)), 2),
        ("attention", lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3), 2.5),
        ("lstm", lambda x: nn.LSTM(8, 16)(x[:, None])[0], 2),
        ("grouped", lambda x: _grouped(x) * r(8, 16), 2),
    ],
)
def test_a_backward_counts_its_products(name: str, make: Any, times: float) -> None:
    forward = Tally()
    counter = OperationCounter(forward)
    with counter:
        out = make(r(4, 8, requires_grad=True)).sum()
        out.backward()
    assert counter.gradients.flops == times * forward.flops > 0


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_the_attention_kernels_of_gpus_count(kind: str) -> None:
    """By their shapes, which the meta device computes."""
    x = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16)
    own = () if kind == "flash" else (None, True)
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    assert counted(lambda: forward(x, x, x, *own)) == 65536
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward")
    assert known_formulas()[backward](x, x, x, x) == 163840


def _grouped(x: Tensor) -> Tensor:
    weight = r(2, 16, 16, requires_grad=True)
    return F.grouped_mm(torch.cat([x, x]).repeat(1, 2), weight, offs=OFFSETS)


def test_numbers_as_text() -> None:
    assert units.number_to_string(999) == "999 " and units.number_to_string(1e12) == "1 T"
    assert units.number_to_string(0.5) == "500 m" and units.number_to_string(1e-9) == "0 u"
    assert units.macs_to_string(1500) == "1.5 KMACs" and units.bytes_to_string(10) == "10 B"
    assert units.flops_to_string(2.345e9) == "2.35 GFLOPS"
    assert units.params_to_string(61706) == "61.71 K" and units.duration_to_string(3e-6) == "3 us"


LINEAR = 4 * 8 * 8  # MACs of one layer for the batch below
X = torch.ones(4, 8)


class Steps(ProfileClock):
    """Each look at it takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0

    def now(self) -> int:
        self.passed += 1
        return self.passed

    def finish(self) -> None:
        return

    def seconds(self, start: int, stop: int) -> float:
        return float(stop - start)


def linear() -> nn.Linear:
    return nn.Linear(8, 8, bias=False)


class Twice(nn.Module):
    """Calls one layer twice, and multiplies by itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x)) * 2


def record(model: nn.Module, *inputs: Tensor, **how: Any) -> Profile:
    recorder = Recorder(model, **how)
    with recorder.forward():
        model(*inputs)
    return recorder.profile()


def is_clean() -> bool:
    """Neither hooks nor modes are installed."""
    hooks = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
    return not any(hooks) and _get_current_dispatch_mode() is None


def test_each_module_counts_what_is_inside() -> None:
    model = nn.Sequential(Twice(linear()), nn.ReLU(), linear())
    found = record(model, X, clock=Steps())
    assert (found.macs, found.flops) == (3 * LINEAR, 6 * LINEAR)
    assert [found.root.find(path).seconds for path in ("0.layer", "0")] == [2.0, 5.0]
    layer = found.root.find("0.layer")
    assert (layer.macs, layer.calls, layer.params) == (2 * LINEAR, 2, 64)
    assert found.root.find("0").flops == 4 * LINEAR
    assert found.root.find("1").flops == 0
    assert found.params == 128
    with pytest.raises(KeyError, match=r"0\.missing"):
        found.root.find("0.missing")


def test_a_shared_module_counts_where_it_was_called() -> None:
    shared = linear()
    model = nn.Sequential(Twice(shared), Twice(shared), shared)
    found = record(model, X)
    assert [child.macs for child in found.root.children] == [2 * LINEAR, 2 * LINEAR, LINEAR]
    assert found.macs == 5 * LINEAR and found.params == 64


def test_an_ignored_class_counts_for_its_parent() -> None:
    model = nn.Sequential(Twice(linear()), linear())
    found = record(model, X, ignored=(nn.Linear,))
    assert found.root.find("0.layer").macs == found.root.find("1").macs == 0
    assert found.root.find("0").macs == 2 * LINEAR
    assert found.macs == 3 * LINEAR


def test_an_exception_that_the_model_catches_leaves_the_places_right() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.layer = nn.Sequential(Fails()), linear()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.fails(x)  # type: ignore[no-any-return]
            except ValueError:
                return self.layer(x) * 2  # type: ignore[no-any-return]

    found = record(nn.Sequential(Tries(), linear()), X)
    assert [child.macs for child in found.root.children] == [LINEAR, LINEAR]
    assert found.root.find("0.fails").flops == 0


def test_nothing_stays_installed() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    model = nn.Sequential(linear(), Fails())
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    recorder = Recorder(model)
    with pytest.raises(ValueError, match="no"), recorder.forward():
        model(X)
    assert is_clean()
    recorder.start()
    X @ X.t()  # in no module: it does not count
    assert not is_clean()
    with pytest.raises(ValueError, match="no"):
        model(X)
    assert _get_current_dispatch_mode() is None  # between calls, too
    recorder.stop()
    recorder.stop()
    assert is_clean()
    assert recorder.profile().macs == 2 * LINEAR
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_is_no_forward(reentrant: bool) -> None:
    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(linear(), nn.ReLU(), linear())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    model = nn.Sequential(linear(), Saves())
    recorder = Recorder(model)
    with recorder.forward():
        out = model(X).sum()
    with recorder.backward():
        out.backward()
    found = recorder.profile()
    assert found.macs == 3 * LINEAR
    assert found.root.find("1.block.0").calls == 1
    assert found.backward is not None
    assert found.backward.macs == 5 * LINEAR  # the data has no gradient
    # without reentrance torch stops when it has what backward needs: before the last layer
    assert found.backward.recomputed_macs == (2 if reentrant else 1) * LINEAR


# ---- as text --------------------------------------------------------------------------------------


def fixed() -> Profile:
    layer = ModuleProfile("fc", "Linear", "in_features=8", 72, 1, 512, 0.002, ())
    act = ModuleProfile("act", "ReLU", "", 0, 1, 0, 0.001, ())
    root = ModuleProfile("", "Net", "", 72, 1, 512, 0.004, (layer, act))
    return Profile(root)


def test_a_tree_has_a_line_for_each_module() -> None:
    assert tree(fixed())[2:] == [
        "Net           72 = 100% params, 256 MACs = 100% MACs, 512 = 100% flops, 4 ms = 100% latency, "
        "128 KFLOPS",
        "  fc: Linear  72 = 100% params, 256 MACs = 100% MACs, 512 = 100% flops, 2 ms = 50% latency, "
        "256 KFLOPS  (in_features=8)",
        "  act: ReLU   0 = 0% params, 0 MACs = 0% MACs, 0 = 0% flops, 1 ms = 25% latency, 0 FLOPS",
    ]
    assert len(tree(fixed(), depth=0)) == 3


def test_a_report_shows_what_was_asked_for() -> None:
    text = report(fixed(), Setting(step=2, places={"world size": 1}), Detail(0, 1, False))
    assert "Profile of step 2" in text and "world size:" in text
    assert "depth 0:" in text and "depth 1:" not in text and "fc" not in text
    assert "bwd" not in text
    deep = report(fixed(), Setting(recompute_factor=0.5), Detail(top=2))
    assert "params       Linear 72, ReLU 0" in deep
    assert "estimated as 2.5 * fwd" in deep and "1.28 K" in deep


ROWS, WIDTH, DEPTH = 4, 8, 4
PARAMS = DEPTH * (WIDTH * WIDTH + WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


class Model(nn.Module):
    """Blocks of one layer; returns the loss. Notes what is installed while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.recorded: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        hooks = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
        self.recorded.append(bool(any(hooks) and _get_current_dispatch_mode()))
        assert any(hooks) == (_get_current_dispatch_mode() is not None)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def engine_of(*, accumulation: int = 1, more: dict[str, Any] | None = None, **section: Any) -> Any:
    torch.manual_seed(0)
    settings = config(samples=ROWS, accumulation=accumulation, **(more or {}))
    settings["flops_profiler"] = {"enabled": True, **section}
    return xds.initialize(Model(), settings)


def train(engine: Any, steps: int, rows: int = ROWS) -> None:
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(torch.ones(rows, WIDTH)))
            engine.step()


def test_only_the_step_of_the_config_is_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(profile_step=2, accumulation=2)
    train(engine, 2)
    assert engine.flops_profile() is None and not capsys.readouterr().out
    train(engine, 2)
    assert engine.module.recorded == [False] * 4 + [True] * 2 + [False] * 2
    text = capsys.readouterr().out
    assert text.count("Profile of step 3\n") == 1
    found = engine.flops_profile()
    # figures are those of one of the two micro-batches
    assert (found.macs, found.params, found.num_batches) == (DEPTH * LINEAR, PARAMS, 2)
    assert found.flops == 2 * found.macs
    assert found.backward.macs == (2 * DEPTH - 1) * LINEAR
    assert found.seconds["step"] > 0
    assert re.search(r"fwd MACs per GPU: +1.02 KMACs", text)
    assert re.search(r"micro-batches of a step: +2", text)
    engine.destroy()


def test_several_steps_are_one_mean_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "profile.txt"
    engine = engine_of(profile_step=[1, 2], output_file=str(path), detailed=False)
    train(engine, 1)
    train(engine, 1, rows=2 * ROWS)
    assert not path.exists()
    train(engine, 2)
    assert engine.module.recorded == [False, True, True, False]
    assert engine.flops_profile().macs == 1.5 * DEPTH * LINEAR
    text = path.read_text()
    assert "Profile of step 2 to 3" in text and "Detailed" not in text
    assert not capsys.readouterr().out
    engine.destroy()


def test_evaluation_in_a_profiled_step_does_not_count() -> None:
    engine = engine_of(profile_step=0)
    engine.backward(engine(torch.ones(ROWS, WIDTH)))
    engine.eval()
    engine(torch.ones(ROWS, WIDTH))
    engine.train()
    with torch.no_grad():
        engine(torch.ones(ROWS, WIDTH))
    engine.step()
    assert engine.flops_profile().macs == DEPTH * LINEAR
    engine.destroy()


def test_a_backward_that_the_script_calls_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(profile_step=0, recompute_fwd_factor=1.0)
    engine(torch.ones(ROWS, WIDTH)).backward()
    engine.step()
    text = capsys.readouterr().out
    assert engine.flops_profile().backward is None
    assert "not counted: the script called backward" in text and "estimated as 3 * fwd" in text
    engine.destroy()


# ---- several ranks --------------------------------------------------------------------------------


def counts_of(more: dict[str, Any], steps: int = 2) -> tuple[Any, ...]:
    engine = engine_of(more=more, detailed=False)
    train(engine, steps)
    found = engine.flops_profile()
    engine.destroy()
    return found.macs, found.flops, found.params, found.backward


def counts_at(cases: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [counts_of(case) for case in cases]


def test_every_stage_counts_the_same() -> None:
    """Whole parameters and products, with recomputation counted apart."""
    stages = [{"zero_optimization": {"stage": stage}} for stage in range(4)]
    again = [stage | {"activation_checkpointing": {}} for stage in stages]
    for found in run_ranks(counts_at, 2, stages + again):
        assert {(macs, params) for macs, _, params, _ in found} == {(DEPTH * LINEAR, PARAMS)}
        assert len({flops for _, flops, _, _ in found}) == 1
        assert {backward.macs for *_, backward in found} == {(2 * DEPTH - 1) * LINEAR}
        recomputed = [backward.recomputed_macs for *_, backward in found]
        assert recomputed == [0] * 4 + [DEPTH * LINEAR] * 4


LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def llama_counts(more: dict[str, Any]) -> tuple[Any, ...]:
    """Forward and backward MACs of this rank, its parameters, and those of the whole model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    whole = sum(param.numel() for param in model.parameters())
    profiler = {"enabled": True, "detailed": False}
    engine = xds.initialize(model, config(accumulation=4, flops_profiler=profiler, **more))
    ids = torch.arange(32).view(2, 16)
    batches = iter([{"input_ids": ids, "labels": ids}] * 8)
    for _ in range(2):
        engine.train_batch(batches)
    found = engine.flops_profile()
    engine.destroy()
    return found.macs, found.backward.macs, found.params, whole


@pytest.mark.parametrize(
    "more",
    [
        {"pipeline": {"stages": 2, "schedule": "zero_bubble"}},
        {"tensor_parallel": {"autotp_size": 2}},
        {"sequence_parallel_size": 2},
    ],
    ids=["zero-bubble", "tensor", "sequence"],
)
@pytest.mark.quick("tensor")
def test_ranks_that_share_a_model_count_their_parts(more: dict[str, Any]) -> None:
    (alone,) = run_ranks(llama_counts, 1, {})
    parts = run_ranks(llama_counts, 2, more)
    assert sum(part[0] for part in parts) == alone[0]
    assert sum(part[1] for part in parts) == alone[1]
    if "pipeline" in more:
        assert sum(part[2] for part in parts) == alone[3]
    elif "tensor_parallel" in more:
        assert all(alone[3] / 2 < part[2] < 0.6 * alone[3] for part in parts)
    else:
        assert [part[2] for part in parts] == [alone[3]] * 2


def test_time_is_that_of_the_modules_calls() -> None:
    found = record(nn.Sequential(Twice(linear())), X, clock=Steps())
    layer, twice, root = (found.root.find(path) for path in ("0.layer", "0", ""))
    assert (layer.seconds, twice.seconds, root.seconds) == (2.0, 5.0, 7.0)
    assert found.seconds == {"forward": 9.0}


def test_between_start_and_stop_calls_of_any_module_count() -> None:
    model = nn.Sequential(linear(), linear())
    recorder = Recorder(model)
    recorder.start()
    recorder.start()
    X @ X.t()  # in no module
    model(X)
    model[1](X)
    recorder.stop()
    model(X)
    found = recorder.profile()
    assert [child.macs for child in found.root.children] == [LINEAR, 2 * LINEAR]


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_layers_that_torch_fuses_for_inference_count(inference: Callable[[], Any]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.ones(2, 4, 8)
    trained = record(layer, x)
    with inference():
        found = record(layer.eval(), x)
    assert found.macs == trained.macs == 8 * (4 * 64 + 2 * 8 * 16) + 2 * 4 * 4 * 8 * 2


def test_formulas_that_others_register_with_torch_count() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return flex_attention(x, x, x)

    recorder = Recorder(model := Flex())
    with (
        pytest.warns(UserWarning, match="flex_attention called without torch.compile"),
        recorder.forward(),
    ):
        model(r(1, 2, 128, 16))
    found = recorder.profile()
    assert found.macs == 2 * 2 * 128 * 128 * 16


def test_a_file_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(profile_step=0, output_file=str(tmp_path))
    with caplog.at_level(logging.WARNING, "xds"):
        train(engine, 1)
    assert "flops_profiler.output_file" in caplog.text
    assert "Profile of step 1" in capsys.readouterr().out
    engine.destroy()
