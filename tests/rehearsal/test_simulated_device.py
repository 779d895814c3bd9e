"""Devices that are neither CPU nor CUDA: "xsim", and "plain", which lacks what Apple's lack. See stand_in.py.

Messages go through host memory, by gloo itself. Every number is that of the CPU to the last bit: ops of both
are the CPU's, and native ones are off, since other devices have none. Ranks on the CPU are new processes: once
a process has loaded kernels, all its engines run them. Without fp64 norms differ by rounding.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from device_ranks import ranks
from helpers import run_new_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel

import xds
from xds.offload.pinned import host_memory
from xds.ops.device import present

sys.path.append(str(Path(__file__).parents[1] / "contract"))
from same_bits import batch, build, cases, config_of, train  # noqa: E402

STEPS, MORE_STEPS = 3, 5  # one-bit messages begin with the fourth
CONFIG = {"ops": {"native": False}}
TIMED = {
    "comms_logger": {"enabled": True, "debug": True}
}  # waits for each message, so races are hidden
DEFAULT = (
    "2 ranks, stage 2, fp32, host",
    "2 ranks, stage 3, bf16, accumulation 2",
)
MORE = (
    "2 ranks, stage 0, fp16, accumulation 1",  # its steps overflow, so states are those of before
    "2 ranks, stage 2, fp32, edits",
    "2 ranks, stage 2, fp32, host, accumulation",
    "2 ranks, stage 2, fp32, host, edits",
    "2 ranks, stage 2, fp32, host, freezing",
    "2 ranks, stage 3, fp32, reentrant",
    "2 ranks, stage 3, fp32, all on the host",
    "2 ranks, stage 3, fp32, all on the host, edits",
    "2 ranks, stage 3, fp32, all on the host, super",
    "2 ranks, stage 3, fp32, all on disk",
    "2 ranks, 1-bit Adam, stage 1",
    "2 ranks, ZeRO++, stage 2, fp32, host",
    "2 ranks, ZeRO++, stage 3, fp32",
    "2 ranks, ZeRO++, stage 3, fp32, host",
)
COMPRESSED = ("2 ranks, 1-bit Adam, stage 1", "2 ranks, ZeRO++, stage 3, fp32")


def results(names: list[str], folder: str, steps: int) -> list[Any]:
    """Losses, norms and a digest of all states, by case; or the error of the case.

    Training runs on a stream of the script, where there are streams.
    """
    found = []
    for name in names:
        case = cases()[name][1]
        case["config"] = {**CONFIG, **case.get("config", {})}
        # the device has attention's plain formula alone
        with (
            sdpa_kernel(SDPBackend.MATH),
            torch.Stream() if present().has_streams else nullcontext(),
        ):
            found.append(train(case, steps, folder))
    return found


def resumed(folder: str) -> list[list[float]]:
    """The loss after a step, a checkpoint and its load into a second engine; then that engine's parameters."""
    case = {**cases()["2 ranks, stage 2, fp32, accumulation 1"][1], "config": {**CONFIG, **TIMED}}
    losses = []
    for number in range(2):
        engine = xds.initialize(build(case), config_of(case, folder))
        if number == 1:
            engine.load_checkpoint(folder)
        loss = engine(batch(case, number, 0, engine.dp_rank, engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if number == 0:
            engine.save_checkpoint(folder)
        params = [param.detach().cpu().flatten() for param in engine.module.parameters()]
        engine.destroy()
    return [losses, torch.cat(params).tolist()]


def is_page_locked() -> bool:
    """Whether memory is page-locked where that is asked for."""
    return host_memory(8, pin=True).is_pinned()


def both(
    names: list[str], device: str, folder: Path, steps: int = STEPS
) -> tuple[list[Any], list[Any]]:
    """The results of each rank on the device, and on the CPU."""
    (world_size,) = {cases()[name][0] for name in names}
    there = ranks(world_size, device=device).run(results, names, str(folder), steps)
    return there, run_new_ranks(results, world_size, names, str(folder), steps)


def other_bits(names: list[str], folder: Path, steps: int = STEPS) -> list[str]:
    """Cases whose numbers on xsim are not those of the CPU."""
    there, here = both(names, "xsim", folder, steps)
    found = []
    for number, name in enumerate(names):
        if [rank[number] for rank in there] != [rank[number] for rank in here]:
            found.append(f"{name}: {there[0][number]} and {here[0][number]}")
    return found


@pytest.mark.slow
def test_training_has_the_bits_of_the_cpu(tmp_path: Path) -> None:
    assert other_bits([*DEFAULT], tmp_path) == []


def test_a_checkpoint_of_the_device_has_the_bits_of_the_cpu(tmp_path: Path) -> None:
    there = ranks(2, device="xsim").run(resumed, str(tmp_path / "there"))
    assert there == run_new_ranks(resumed, 2, str(tmp_path / "here"))


def test_without_fp64_streams_and_page_locked_memory_norms_are_right(tmp_path: Path) -> None:
    assert ranks(2, device="plain").run(is_page_locked) == [False, False]
    there, here = both([*DEFAULT[:1]], "plain", tmp_path)
    for [found], [wanted] in zip(there, here, strict=True):
        assert found["losses"] == wanted["losses"]
        norms = [[float(norm) for norm in one["norms"]] for one in (found, wanted)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.slow
def test_compressed_messages_need_no_fp64(tmp_path: Path) -> None:
    there, here = both([*COMPRESSED], "plain", tmp_path, MORE_STEPS)
    for found, wanted in zip(there, here, strict=True):
        for one, other, name in zip(found, wanted, COMPRESSED, strict=True):
            for key in ("losses", "norms"):
                numbers = [[float(number) for number in result[key]] for result in (one, other)]
                assert numbers[0] == pytest.approx(numbers[1], rel=1e-5), (name, key)


@pytest.mark.slow
def test_more_cases_of_the_contract_have_the_bits_of_the_cpu(tmp_path: Path) -> None:
    assert other_bits([*MORE], tmp_path, MORE_STEPS) == []
