"""The recorder: work and time of each module, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from xds.engine.profiling.clock import Clock
from xds.engine.profiling.profile import ModuleProfile, Profile
from xds.engine.profiling.recorder import Recorder
from xds.engine.profiling.text import Detail, Setting, report, tree

LINEAR = 4 * 8 * 8  # MACs of one layer for the batch below
X = torch.ones(4, 8)


class Steps(Clock):
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
    found = record(model, X)
    assert (found.macs, found.flops) == (3 * LINEAR, 6 * LINEAR)
    layer = found.root.find("0.layer")
    assert (layer.macs, layer.calls, layer.params) == (2 * LINEAR, 2, 64)
    assert found.root.find("0").flops == 4 * LINEAR
    assert found.root.find("1").flops == 0
    assert found.params == 128
    with pytest.raises(KeyError, match=r"0\.missing"):
        found.root.find("0.missing")


def test_time_is_that_of_the_modules_calls() -> None:
    found = record(nn.Sequential(Twice(linear())), X, clock=Steps())
    layer, twice, root = (found.root.find(path) for path in ("0.layer", "0", ""))
    assert (layer.seconds, twice.seconds, root.seconds) == (2.0, 5.0, 7.0)
    assert found.seconds == {"forward": 9.0}


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
    assert not is_clean()
    with pytest.raises(ValueError, match="no"):
        model(X)
    assert _get_current_dispatch_mode() is None  # between calls, too
    recorder.stop()
    recorder.stop()
    assert is_clean()
    assert recorder.profile().macs == 2 * LINEAR
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


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


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_layers_that_torch_fuses_for_inference_count(inference: Callable[[], Any]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.ones(2, 4, 8)
    trained = record(layer, x)
    with inference():
        found = record(layer.eval(), x)
    assert found.macs == trained.macs == 8 * (4 * 64 + 2 * 8 * 16) + 2 * 4 * 4 * 8 * 2


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
