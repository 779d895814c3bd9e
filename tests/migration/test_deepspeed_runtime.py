"""Tests of small modules of `xds.deepspeed`: configs, devices, timers, collectives, checkpointed calls."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks
from layer import config, on_ranks, start
from models import build, micro_batch
from torch import nn

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed import checkpointing
from xds.deepspeed.accelerator import get_accelerator
from xds.deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from xds.deepspeed.accelerator.mps_accelerator import MPS_Accelerator
from xds.deepspeed.accelerator.npu_accelerator import NPU_Accelerator
from xds.deepspeed.accelerator.xpu_accelerator import XPU_Accelerator
from xds.deepspeed.runtime import lr_schedules
from xds.deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
from xds.deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from xds.deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from xds.deepspeed.runtime.utils import set_random_seed
from xds.deepspeed.utils import logger, zero_to_fp32
from xds.deepspeed.utils.init_on_device import OnDevice
from xds.deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer
from xds.engine.deepspeed.library import activation_checkpointing as own_checkpointing
from xds.engine.deepspeed.start import _with_defaults as with_defaults

# -- configs ----------------------------------------------------------------------------------------------


def test_a_config_works_out_its_batch_sizes(tmp_path: Path) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for given, sizes in (
        ((64, None, None), (64, 64, 1)),
        ((64, None, 4), (64, 16, 4)),
        ((64, 8, None), (64, 8, 8)),
        ((None, 8, 2), (16, 8, 2)),
    ):
        values = {name: value for name, value in zip(names, given, strict=True) if value}
        (tmp_path / "config.json").write_text(json.dumps(values))
        for source in (values, str(tmp_path / "config.json")):
            found = DeepSpeedConfig(source)
            assert tuple(getattr(found, name) for name in names) == sizes
    for kind in (ValueError, AssertionError):
        for wrong in ((None, None, 2), (33, 17, None), ("8", None, None)):
            with pytest.raises(kind):
                DeepSpeedConfig({n: v for n, v in zip(names, wrong, strict=True) if v})


def test_a_config_has_deepspeeds_attributes_and_defaults() -> None:
    given: dict[str, Any] = {"train_batch_size": 2, "bf16": {"enabled": True}}
    given |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    found = DeepSpeedConfig(given | {"zero_optimization": {"stage": 2}})
    assert (found.optimizer_name, found.optimizer_params) == ("adamw", {"lr": 1e-3})
    assert found.zero_enabled and found.zero_optimization_stage == 2 == found.zero_config.stage
    assert found.bfloat16_enabled and not found.fp16_enabled and found.loss_scale == 0
    assert found.gradient_clipping == 1.0 and found.scheduler_name is None
    assert DtypeEnum("torch.bfloat16").value == torch.bfloat16 == DtypeEnum("bf16").value


def test_what_has_no_effect_in_a_config_is_one_line_for_all_engines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL writes the key with a dot, for its second engine."""
    monkeypatch.setenv("RANK", "0")
    zero = {"stage": 3, "sub_group_size": 1e9, "reduce_bucket_size": 5e8}
    given: dict[str, Any] = {"train_batch_size": 1, "zero_optimization": zero}
    given["zero_optimization.reduce_bucket_size"] = 1024
    with caplog.at_level(logging.INFO, "xds"):
        for _ in range(2):
            with_defaults(given)
    dots, idle = (record.getMessage() for record in caplog.records)
    assert "(zero_optimization.reduce_bucket_size); TRL writes them" in dots
    assert idle.startswith("config: 2 keys have no effect (zero_optimization.sub_group_size, ")


# -- schedules --------------------------------------------------------------------------------------------


def test_schedules_refuse_as_deepspeeds_do_and_a_curriculum_rises_in_steps() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="warmup_num_steps"):
        lr_schedules.WarmupLR(optimizer, warmup_num_steps=-5)
    with pytest.raises(ValueError, match="cycle_first_step_size"):
        lr_schedules.OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=0)
    section = {"total_curriculum_step": 100, "difficulty_step": 16}
    limits = {"min_difficulty": 8, "max_difficulty": 1000}
    kind = {"schedule_type": "fixed_linear", "schedule_config": section}
    scheduler = CurriculumScheduler(limits | kind)
    found = [scheduler.update_difficulty(step) for step in range(120)]
    assert found[0] == 16 and found[-1] == 1000 and found == sorted(found)
    assert all(one % 16 == 0 for one in found if one < 1000)


def test_a_dynamic_scale_can_stay_at_its_minimum() -> None:
    scaler = DynamicLossScaler(4.0, 2, 1.0, 1, False, raise_error_at_min_scale=False)
    for expected in (2.0, 1.0, 1.0):
        scaler.update_scale(True)
        assert scaler.loss_scale == expected
    for _ in range(3):
        scaler.update_scale(False)
    assert (scaler.loss_scale, scaler.cur_iter, scaler.last_overflow_iter) == (2.0, 6, 2)


# -- the device -------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    get_accelerator.__wrapped__.cache_clear()
    yield monkeypatch
    get_accelerator.__wrapped__.cache_clear()


def test_what_scripts_ask_of_the_device_is_there_on_a_cpu(on_cpu: pytest.MonkeyPatch) -> None:
    found = get_accelerator()
    assert torch.ones(2, device=found.current_device()).device.type == found.device_name() == "cpu"
    assert (
        found.current_device_name() == "cpu" and found.is_available() and found.is_bf16_supported()
    )
    assert found is get_accelerator() and found.communication_backend_name() == "gloo"
    assert 0 < found.available_memory() <= found.total_memory()
    assert 0 < found.memory_allocated() <= found.max_memory_allocated() < found.total_memory()
    assert found.memory_stats()["allocated_bytes.all.current"] > 0
    state = found.get_rng_state()
    first = torch.rand(3)
    found.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    assert found.IntTensor([0]).dtype == torch.int32 and found.current_stream() is None
    found.set_device(0)
    found.synchronize()
    found.empty_cache()
    found.manual_seed_all(4)
    first = torch.rand(2)
    found.manual_seed(4)
    assert torch.equal(torch.rand(2), first)
    with found.device(0), found.stream(found.Stream()):
        assert found.on_accelerator(torch.ones(1))
    with pytest.raises(AttributeError, match="get_accelerator\\(\\).warp is not covered"):
        _ = found.warp


def test_devices_of_a_cpu_are_its_ranks_and_others_are_refused(on_cpu: pytest.MonkeyPatch) -> None:
    for variable in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        on_cpu.delenv(variable, raising=False)
    assert get_accelerator().device_count() == 2  # what `xds` starts
    for variable, count in (("LOCAL_WORLD_SIZE", 3), ("LOCAL_SIZE", 4)):
        on_cpu.setenv(variable, str(count))
        assert get_accelerator().device_count() == count
    on_cpu.setattr(torch, "npu", SimpleNamespace(device_count=lambda: 3), raising=False)
    for name, kind, backend, variables in (
        ("cuda", CUDA_Accelerator, "nccl", ["CUDA_VISIBLE_DEVICES"]),
        ("xpu", XPU_Accelerator, "xccl", ["ZE_AFFINITY_MASK"]),
        ("npu", NPU_Accelerator, "hccl", ["ASCEND_RT_VISIBLE_DEVICES"]),
        ("mps", MPS_Accelerator, "gloo", []),
    ):
        on_cpu.setenv("DS_ACCELERATOR", name)
        get_accelerator.__wrapped__.cache_clear()
        found = get_accelerator()
        assert type(found) is kind and found.device_name(1) == f"{name}:1"
        assert found.communication_backend_name() == backend
        environment: dict[str, str] = {}
        found.set_visible_devices_envs(environment, [2, 5])
        assert environment == dict.fromkeys(variables, "2,5") and found.device_count() == 3 * (
            name == "npu"
        )
    for name, said in (
        (
            "mlu",
            "DS_ACCELERATOR = 'mlu': this torch has no such device; install torch_mlu, or unset",
        ),
        ("tpu", "DS_ACCELERATOR = 'tpu': must be one of cpu, cuda, rocm, xpu, npu, mps, hpu, mlu;"),
    ):
        on_cpu.setenv("DS_ACCELERATOR", name)
        get_accelerator.__wrapped__.cache_clear()
        with pytest.raises(ValueError, match=said):
            get_accelerator()


# what DeepSpeed 0.19.6's abstract accelerator has; tests/rehearsal/test_simulated_device.py calls them
METHODS = """
is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure device_name
device set_device current_device current_device_name device_count synchronize random set_rng_state
get_rng_state manual_seed manual_seed_all initial_seed default_generator Stream stream current_stream
default_stream Event empty_cache memory_allocated max_memory_allocated reset_max_memory_allocated
memory_cached max_memory_cached reset_max_memory_cached memory_stats reset_peak_memory_stats memory_reserved
max_memory_reserved total_memory available_memory is_bf16_supported is_fp16_supported supported_dtypes
is_available range_push range_pop lazy_call communication_backend_name is_triton_supported
prefer_triton_grouped_mm create_graph capture_to_graph replay_graph BFloat16Tensor ByteTensor DoubleTensor
FloatTensor HalfTensor IntTensor LongTensor pin_memory is_pinned unpin_memory on_accelerator op_builder_dir
create_op_builder get_op_builder build_extension export_envs visible_devices_envs set_visible_devices_envs
get_compile_backend set_compile_backend
"""


def test_every_kind_of_accelerator_has_the_methods_of_deepspeed(on_cpu: pytest.MonkeyPatch) -> None:
    bare = SimpleNamespace(device_count=lambda: 1, is_available=lambda: True, __name__="torch.bare")
    for name in ("npu", "hpu", "mlu"):
        on_cpu.setattr(torch, name, bare, raising=False)
    for name in ("cpu", "cuda", "rocm", "xpu", "npu", "mps", "hpu", "mlu"):
        on_cpu.setenv("DS_ACCELERATOR", name)
        get_accelerator.__wrapped__.cache_clear()
        found = get_accelerator()
        assert [method for method in METHODS.split() if not hasattr(found, method)] == [], name
        assert found.device_name() == ("cuda" if name == "rocm" else name)
        assert found.is_synchronized_device() == (name == "cpu")
        assert found.use_host_timers() == (name in ("cpu", "mps"))
        assert not found.is_triton_supported()


def test_a_model_is_built_on_a_device_in_a_dtype() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        model, numbers = nn.Linear(3, 2), torch.arange(3)
    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.bfloat16)
    assert numbers.dtype == torch.int64 and torch.get_default_dtype() == torch.float32
    with OnDevice(torch.float16, enabled=False):
        assert nn.Linear(1, 1).weight.device.type == "cpu"


# -- random numbers and checkpointed calls ----------------------------------------------------------------


def test_random_states_are_seeded_tracked_and_reconfigured() -> None:
    set_random_seed(7)
    first = numpy.random.rand(), torch.rand(1).item()
    set_random_seed(7)
    assert (numpy.random.rand(), torch.rand(1).item()) == first

    tracker = checkpointing.CudaRNGStatesTracker()
    before = torch.get_rng_state()
    tracker.add("dropout", 7)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = []
    for _ in range(2):
        with tracker.fork("dropout"):
            drawn.append(torch.rand(3))
    torch.manual_seed(7)
    assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(3), torch.rand(3)]))
    with pytest.raises(ValueError, match="must be new"):
        tracker.add("other", 7)

    checkpointing.model_parallel_cuda_manual_seed(7)
    outside, draws = torch.get_rng_state(), []
    for seed in (1, 2, 1):
        checkpointing.model_parallel_reconfigure_tp_seed(seed)
        with checkpointing.get_cuda_rng_tracker().fork():
            draws.append(float(torch.rand(())))
    assert draws[0] == draws[2] != draws[1] and torch.equal(torch.get_rng_state(), outside)
    checkpointing.get_cuda_rng_tracker().reset()
    with pytest.raises(ValueError, match="there is no such state"):
        checkpointing.model_parallel_reconfigure_tp_seed(1)


def test_checkpointed_calls_recompute_and_give_the_same_gradients(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_checkpointing, "_settings", own_checkpointing._Settings())
    own_checkpointing.warning_once.cache_clear()
    layer, calls = nn.Linear(4, 4), []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointing.configure(None, num_checkpoints=2, checkpoint_in_cpu=True)
    assert checkpointing.is_configured()
    with caplog.at_level(logging.WARNING):
        for number in (2, 4):
            checkpointing.checkpoint(layer, torch.ones(2, 4)).sum().backward()
            assert len(calls) == number
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 4.0))
    assert len([one for one in caplog.messages if "checkpoint_in_cpu" in one]) == 1
    both = {"partition_activations": True, "contiguous_checkpointing": True}
    with pytest.raises(AssertionError, match="num_checkpoints"):
        checkpointing.configure(None, **both)

    x = torch.ones(1, requires_grad=True)
    found, number, frozen = checkpointing.detach_variable((x * 2, 3, torch.ones(1)))
    assert found.is_leaf and found.requires_grad and number == 3 and not frozen.requires_grad
    assert checkpointing.detach_variable((x,), device="meta")[0].is_meta
    with pytest.raises(xds.UsageError, match="pass a tuple"):
        checkpointing.detach_variable([x])


# -- collectives, logs, timers ----------------------------------------------------------------------------


@on_ranks(2)
def test_collectives_are_torchs() -> None:
    comm = deepspeed.comm
    rank, world = comm.get_rank(), comm.get_world_size()
    ones = torch.ones(6)
    comm.all_reduce(total := ones * (rank + 1))
    comm.all_gather_into_tensor(gathered := torch.empty(6 * world), tensor=ones * rank)
    comm.reduce_scatter_tensor(output_tensor=(part := torch.empty(3)), tensor=torch.ones(3 * world))
    parts = [torch.empty(6) for _ in range(world)]
    comm.all_gather(parts, ones * rank, async_op=True).wait()
    comm.broadcast(value := torch.full((2,), float(rank)), 1)
    received, sent = torch.empty(4), torch.full((4,), float(rank))
    operations = [
        comm.P2POp(comm.isend, sent, 1 - rank),
        comm.P2POp(comm.irecv, received, 1 - rank),
    ]
    for work in comm.batch_isend_irecv(operations):
        work.wait()
    comm.barrier()
    assert [t.sum().item() for t in (total, gathered, part, parts[1])] == [18, 6, 6, 6]
    assert value.tolist() == [1.0, 1.0] and received.tolist() == [1.0 - rank] * 4


@on_ranks(2, processes=True)
def test_the_log_of_messages_is_that_of_the_engines() -> None:
    with pytest.raises(AssertionError, match="set comms_logger.enabled"):
        deepspeed.comm.configure(enabled=True)
    engine = start(build("plain"), 3, samples=4, comms_logger={"enabled": True})
    engine.backward(engine(micro_batch(0, engine.global_rank)))
    engine.step()
    deepspeed.comm.configure(engine.config)
    with redirect_stdout(StringIO()) as said:
        deepspeed.comm.log_summary(show_straggler=True)
    assert ("reduce_scatter" in said.getvalue()) == (engine.global_rank == 0)


def test_the_level_of_deepspeeds_logger_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="xds")
    logger.info("shown")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        logger.warning("hidden")
    finally:
        logging.getLogger("DeepSpeed").setLevel(logging.NOTSET)
    assert caplog.messages == ["shown"]


def test_timers(caplog: pytest.LogCaptureFixture) -> None:
    timers = SynchronizedWallClockTimer()
    for _ in range(3):
        timers("data").start()
        timers("data").stop()
    assert timers("data").elapsed(reset=False) > 0
    with caplog.at_level(logging.INFO, "xds"):
        timers.log(["data", "none"])
    assert "time (ms) | data: " in caplog.text
    assert timers("data").elapsed() == 0.0
    with pytest.raises(xds.UsageError, match="is not started"):
        timers("data").stop()
    timers("data").start()
    with pytest.raises(xds.UsageError, match="already been started"):
        timers("data").start()
    assert "mem_allocated: " in timers.memory_usage()

    lines: list[str] = []
    enabled = SimpleNamespace(enabled=True, synchronized=True)
    timer = ThroughputTimer(enabled, 32, steps_per_output=2, logging_fn=lines.append)
    assert timer.avg_samples_per_sec() == float("-inf")
    for _ in range(4):
        for is_last in (False, True):
            timer.start()
            timer.stop(global_step=is_last)
    assert (timer.global_step_count, timer.micro_step_count) == (4, 8)
    assert timer.avg_samples_per_sec() == pytest.approx(64 / (timer.total_elapsed_time + 1e-6))
    assert [line.partition(",")[0] for line in lines] == ["epoch=0/micro_step=8/global_step=4"]


def ends_with_the_group() -> None:
    engine = start(nn.Linear(4, 2), watch={"heartbeat_seconds": 0.1})
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    (thread,) = [one for one in threading.enumerate() if one.name == "xds-watch"]
    dist.destroy_process_group()
    thread.join(60)
    assert not thread.is_alive()
    # the helper ends one
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_the_watcher_ends_with_the_process_group() -> None:
    run_new_ranks(ends_with_the_group, 2)


# -- weights of checkpoints -------------------------------------------------------------------------------


def test_a_universal_checkpoint_of_deepspeed_names_its_source(tmp_path: Path) -> None:
    (tmp_path / "t_universal/zero/0.weight").mkdir(parents=True)
    torch.save({}, tmp_path / "t_universal/mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("t_universal")
    with pytest.raises(xds.UsageError, match="universal checkpoint of DeepSpeed.* --tag ITS_TAG"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_lazy_weights_are_read_one_by_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    engine = deepspeed.initialize(model=model, config=config(1))[0]
    engine.save_checkpoint(tmp_path)
    expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()

    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert lazy.keys() == expected.keys() and lazy["0.weight"] is lazy["1.weight"]
    assert lazy["0.weight"].shape == (4, 4) and lazy["0.weight"].numel() == 16
    assert all(torch.equal(one.contiguous(), expected[name]) for name, one in lazy.items())
