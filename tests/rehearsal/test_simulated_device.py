"""Devices that are neither CPU nor CUDA: "xsim", and "plain", which lacks what Apple's lack. See stand_in.py.

Messages go through host memory, by gloo itself. Every number is that of the CPU to the last bit: ops of both
are the CPU's, and native ones are off, since other devices have none. Ranks on the CPU are new processes: once
a process has loaded kernels, all its engines run them. Without fp64 norms differ by rounding.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from device_ranks import ranks
from fuzz.draw import draw
from fuzz.feature import REGISTRY
from fuzz.sharded import train as sharded_train
from helpers import run_new_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel

import xds
from xds.deepspeed.accelerator import get_accelerator
from xds.offload.pinned import host_memory
from xds.ops.device import kind_of, present

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
    """Losses, norms and a digest of all states, by case; or the error of the case."""
    found = []
    for name in names:
        case = cases()[name][1]
        case["config"] = {**CONFIG, **case.get("config", {})}
        with own_stream():
            found.append(train(case, steps, folder))
    return found


@contextmanager
def own_stream() -> Iterator[None]:
    """A stream of the script, where there are streams: what runs on the default one is then a race.

    Attention has its plain formula, since the device has no other.
    """
    stream = torch.Stream() if present().has_streams else nullcontext()
    with sdpa_kernel(SDPBackend.MATH), stream:
        yield


def resumed(name: str, more: dict[str, Any], folder: str) -> list[list[float]]:
    """The loss after a step, a checkpoint and its load into a second engine; then that engine's parameters."""
    with own_stream():
        return _resumed(name, more, folder)


def _resumed(name: str, more: dict[str, Any], folder: str) -> list[list[float]]:
    case = {**cases()[name][1], "config": {**CONFIG, **more}}
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
        params = [xds.zero.get_full_param(param).cpu() for param in engine.module.parameters()]
        engine.destroy()
    return [losses, torch.cat([param.flatten() for param in params]).tolist()]


# Kinds of blocks of the fuzzer: torch has no such op for a registered device, or another formula in 16 bits.
NOT_THERE = ("ConvBlock", "RecurrentBlock", "DropoutBlock", "DataAssigned", "AssignedAndRead")


def numbers_of(value: Any) -> Any:
    """The same with lists of numbers for tensors."""
    if isinstance(value, dict):
        return {key: numbers_of(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [numbers_of(one) for one in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def drawn(seeds: list[int], world_size: int) -> list[str]:
    """Of each random training of tests/fuzz a digest of all that it sees, or why it is refused."""
    found = []
    for seed in seeds:
        case = draw(seed, world_size=world_size, drop=NOT_THERE)
        if case.optimizer.startswith("NAdam"):  # torch has another formula for devices
            continue
        if not case.has("WithoutNativeOps"):
            case.features.append(REGISTRY["WithoutNativeOps"](case, random.Random(seed)))
        try:
            with own_stream():
                seen = repr(numbers_of(sharded_train(case)))
        except xds.XdsError as error:
            seen = str(error)
        found.append(f"{case}: {hashlib.sha256(seen.encode()).hexdigest()}")
    return found


def is_page_locked() -> bool:
    """Whether memory is page-locked where that is asked for."""
    return host_memory(8, pin=True).is_pinned()


def answers_of_the_accelerator() -> dict[str, Any]:
    """What each method of DeepSpeed's abstract accelerator answers, as a script calls it."""
    found = get_accelerator()
    device, tensor = found.current_device(), torch.ones(3)
    graph = found.create_graph()
    with found.device(0), found.stream(found.current_stream()), found.capture_to_graph(graph):
        tensor = tensor.to(found.current_device_name())
    stream = None if found.Stream is None else found.Stream()
    with nullcontext() if stream is None else found.stream(stream):
        found.manual_seed(3), found.manual_seed_all(4)
        state = found.get_rng_state()
        drawn = torch.rand(2, device=found.current_device_name())
        found.set_rng_state(state)
        assert torch.equal(torch.rand(2, device=found.current_device_name()), drawn)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        getattr(found, name)()
    (
        found.set_device(device),
        found.synchronize(0),
        found.default_stream(),
        found.replay_graph(graph),
    )
    found.reset_max_memory_allocated(), found.reset_max_memory_cached(0)
    found.range_push("part"), found.range_pop(), found.unpin_memory(tensor)
    environment: dict[str, str] = {}
    found.set_visible_devices_envs(environment, [0])
    found.set_compile_backend(found.get_compile_backend())
    sizes = ("total_memory", "available_memory", "memory_allocated", "max_memory_allocated")
    sizes += ("memory_reserved", "max_memory_reserved", "memory_cached", "max_memory_cached")
    assert all(getattr(found, name)(0) >= 0 for name in sizes)
    assert found.memory_stats()["allocated_bytes.all.current"] >= 0
    assert found.default_generator(0).initial_seed() == found.initial_seed() and found.random()
    pinned = found.pin_memory(torch.ones(2), True, False)
    assert found.is_pinned(pinned) == kind_of(found.device_name()).pins_memory
    assert found.get_op_builder("Unknown") is None is found.create_op_builder("Unknown")
    assert found.create_op_builder("FusedAdamBuilder").is_compatible() and found.build_extension()
    with pytest.raises(ValueError, match="set_compile_backend: 'none' is not supported by"):
        found.set_compile_backend("none")
    return {
        "name": found.device_name(),
        "places": [tensor.device.type, found.FloatTensor([1.0]).device.type],
        "is there": [found.is_available(), found.on_accelerator(tensor), found.device_count() > 0],
        "has events": [found.Event is not None, not found.use_host_timers()],
        "orders": [found.resolves_data_dependency(), found.handles_memory_backpressure()],
        "is synchronous": found.is_synchronized_device(),
        "triton": [found.is_triton_supported(), found.prefer_triton_grouped_mm()],
        "dtypes": len(found.supported_dtypes())
        == 1 + found.is_fp16_supported() + found.is_bf16_supported(),
        "others": [found.communication_backend_name(), found.export_envs(), environment],
        "ops": [found.op_builder_dir(), found.lazy_call(lambda: 1), found.get_compile_backend()],
    }


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


def both_resumed(folder: str) -> list[Any]:
    """With states on the host, and on the device."""
    return [
        resumed("2 ranks, stage 2, fp32, host", TIMED, f"{folder}/host"),
        resumed("2 ranks, stage 3, fp32, accumulation 1", {}, f"{folder}/device"),
    ]


def test_a_checkpoint_of_the_device_has_the_bits_of_the_cpu(tmp_path: Path) -> None:
    there = ranks(2, device="xsim").run(both_resumed, str(tmp_path / "there"))
    assert there == run_new_ranks(both_resumed, 2, str(tmp_path / "here"))


def test_without_fp64_streams_and_page_locked_memory_norms_are_right(tmp_path: Path) -> None:
    assert ranks(2, device="plain").run(is_page_locked) == [False, False]
    there, here = both([*DEFAULT[:1]], "plain", tmp_path)
    for [found], [wanted] in zip(there, here, strict=True):
        assert found["losses"] == wanted["losses"]
        norms = [[float(norm) for norm in one["norms"]] for one in (found, wanted)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_every_method_of_an_accelerator_of_deepspeed_is_there() -> None:
    for device, has_streams in (("cpu", False), ("xsim", True), ("plain", False)):
        is_host = device == "cpu"
        function = answers_of_the_accelerator
        found = function() if is_host else ranks(1, device=device).run(function)[0]
        name = "cpu" if is_host else "xsim"
        assert found == {
            "name": name,
            "places": [name, name],
            "is there": [True] * 3,
            "has events": [has_streams or is_host, has_streams],
            "orders": [is_host] * 2,
            "is synchronous": is_host,
            "triton": [False] * 2,
            "dtypes": True,
            "others": ["gloo", [], {}],
            "ops": ["deepspeed.ops.op_builder", 1, "inductor"],
        }


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


@pytest.mark.slow
def test_random_training_has_the_bits_of_the_cpu_and_no_race() -> None:
    seeds = [
        1046,
        *range(1000, 1006),
    ]  # the first one reads a checkpoint on a stream of the script's
    assert ranks(2, device="xsim").run(drawn, seeds, 2) == run_new_ranks(drawn, 2, seeds, 2)
