"""An engine with kernels, without them, and where they cannot be built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import run_new_ranks
from runs import config
from torch import nn

import xds
from xds.ops import libraries
from xds.utils.errors import BuildError

ROWS = 4


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 5))


def rows(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, 8, generator=generator).bfloat16()


def kernels_are_used(native: bool) -> list[torch.Tensor]:
    """The parameters after two steps, by kernels or by torch's ops."""
    settings = config(0, "bf16", samples=ROWS, ops={"native": native, "require": native})
    assert not libraries.is_loaded("cpu")
    engine = xds.initialize(net(), settings)
    for step in range(2):
        engine.backward(engine(rows(step, 0)).float().square().mean())
        engine.step()
    assert libraries.is_loaded("cpu") is native
    return list(engine.full_state_dict(full_precision=True).values())


def test_kernels_do_what_torchs_ops_do() -> None:
    one, other = (run_new_ranks(kernels_are_used, 1, native)[0] for native in (True, False))
    for found, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def without_compiler(folder: str, require: bool) -> None:
    patch = pytest.MonkeyPatch()
    patch.setenv("PATH", folder)
    patch.setenv("CXX", "")
    patch.setenv("XDS_CACHE_DIR", folder)
    settings = config(0, "bf16", samples=ROWS, optimizer="Lion", ops={"require": require})
    if require:
        with pytest.raises(BuildError, match="compiler"):
            xds.initialize(net(), settings)
        return
    with pytest.warns(libraries.NativeOpsWarning, match="are not used.*compiler"):
        engine = xds.initialize(net(), settings)
    engine.backward(engine(rows(0, 0)).float().square().mean())
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("require", [False, True])
def test_without_a_compiler_training_warns_and_goes_on_or_refuses(
    tmp_path: Any, require: bool
) -> None:
    run_new_ranks(without_compiler, 1, str(tmp_path), require)
