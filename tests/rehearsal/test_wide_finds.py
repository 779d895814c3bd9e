"""What the tests of the CPU found when their ranks had the device (tests_on_device.py): one small case each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device_ranks import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.slow  # by default test_rehearsal, _offload, _decisions and _models run


def viewed() -> bool:
    x = torch.ones(1, device="cuda")
    with torch.inference_mode():
        return x.view(1, 1).is_inference()


def test_a_view_in_inference_mode_is_as_its_base() -> None:
    assert ranks(1).run(viewed) == [False]


class _Twice(nn.Module):
    """Every layer is called twice. In a reentrant checkpoint it gets its second gradient when it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        for layer in [*self.layers, *self.layers]:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=reentrant))
        return x.square().mean()


def late(reentrant: bool) -> list[float]:
    import xds

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 0, "unit_min_numel": 0},
    }
    engine = xds.initialize(_Twice(), config)
    norms = []
    for _ in range(2):
        x = torch.ones(2, 12, device=engine.device).requires_grad_()
        engine.backward(engine(x, reentrant and engine.global_rank == 0))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return norms


def test_late_gradients_of_one_rank_do_not_change_the_order_of_messages() -> None:
    found = ranks(2).run(late, True)
    assert found[0] == pytest.approx(ranks(2).run(late, False)[0], rel=1e-5)


def cast() -> list[torch.dtype]:
    weight, x = torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return [(x @ weight).dtype, (x @ weight).softmax(0).dtype]


def test_autocast_works_on_the_device() -> None:
    assert ranks(1).run(cast) == [[torch.bfloat16, torch.float32]]


def restored(path: str) -> tuple[str, bool]:
    torch.save(torch.ones(2, device="cuda"), path)
    return torch.load(path).device.type, isinstance(0, torch.cuda.device)


def test_a_tensor_of_the_device_is_saved_and_loaded(tmp_path: Path) -> None:
    assert ranks(1).run(restored, str(tmp_path / "x.pt")) == [("cuda", False)]
