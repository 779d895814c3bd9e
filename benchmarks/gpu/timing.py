"""Step times alone on the device. Contestants live in one process and take turns: A B C C B A.

    python benchmarks/gpu/timing.py eager      # or another name of PARTS

A figure is the median; a ratio is the median of the ratios of the same round. All train the same weights on
the same batch, in bf16 with fp32 masters, AdamW and a clipped norm.
"""

from __future__ import annotations

import cProfile
import importlib.util
import json
import logging
import os
import pstats
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import common
import torch
import torch.distributed as dist
from common import ADAMW, DEVICE, IS_CUDA, IS_NATIVE, IS_REHEARSED, IS_TINY, Shape, figure
from gpt import build
from torch import Tensor, nn

Step = Callable[[], Tensor]
TINY = Shape(2, 32, 2, 16, 64)
MEDIUM = TINY if IS_TINY else Shape(24, 1024, 16)  # 355M, 1,024 tokens a sequence
LARGE = TINY if IS_TINY else Shape(24, 2048, 16)  # 1.3B
MANY, FEW = 8, 2  # sequences
MEDIUM_TABLE = "355M GPT, bf16, a step: ms (over plain)"
HOST_TABLE = "355M GPT, 2,048 tokens: the host's part of a step"
ON_DEVICE = "xds 2, all on device"
LARGE_TABLE = "1.3B GPT, bf16, recomputed, 16,384 tokens"
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


class Contestant:
    """What takes steps. `batch` is replaced to train on another number of tokens, [B, T + 1]."""

    def __init__(self, make: Callable[..., Step], shape: Shape, batch: Tensor, **more: Any) -> None:
        self.shape, self.batch, self.engine = shape, batch, None
        before = common.allocated()
        self.step = make(self, **more)
        self.losses = [float(self.step()) for _ in range(3)]
        common.synchronize()
        if IS_CUDA:
            torch.cuda.reset_peak_memory_stats()
        self.step()
        common.synchronize()
        self.peak_bytes = (torch.cuda.max_memory_allocated() if IS_CUDA else before) - before

    def model(self, dtype: torch.dtype = torch.bfloat16, *, recomputes: bool = False) -> Any:
        """The model, drawn on the device."""
        return build(self.shape, torch.device(DEVICE), dtype, recomputes=recomputes)

    def finish(self) -> None:
        """Wait for the device, and for updates that the host does under the next forward."""
        if hasattr(self.engine, "memory_plan"):
            _ = self.engine.optimizer.state  # reading it waits for them
        common.synchronize()

    def end(self) -> None:
        """Free what it holds."""
        if hasattr(self.engine, "memory_plan"):
            self.engine.destroy()
        self.engine = self.step = None  # type: ignore[assignment]
        common.release()


class Race:
    """The contestants over one model, by name; those of xds begin with "xds"."""

    def __init__(self, shape: Shape, sequences: int) -> None:
        self.shape, self.contestants = shape, dict[str, Contestant]()
        self.flops_a_second = matrix_rate()
        self.batch = self.draw(sequences)

    def draw(self, sequences: int) -> Tensor:
        """Random tokens of a step, [B, T + 1]."""
        torch.manual_seed(5)
        size = (sequences, self.shape.context + 1)
        return torch.randint(self.shape.vocabulary, size, device=DEVICE)

    def add(self, name: str, make: Callable[..., Step], **more: Any) -> bool:
        """Build one, take its first steps. False: it failed, or its losses are not those of the first one."""
        print(f"# {name}: build", flush=True)
        start = time.perf_counter()
        try:
            made = Contestant(make, self.shape, self.batch, **more)
            wanted = next(iter(self.contestants.values()), made).losses
            if name.startswith("xds") and common.distance(made.losses, wanted) > 0.02:
                raise ValueError(f"losses are {made.losses}, those of the first are {wanted}")
            print(f"{name}: {time.perf_counter() - start:.1f} s, losses {made.losses}", flush=True)
            self.contestants[name] = made
        except Exception as error:
            self._failed(name, error)
        common.release()
        return name in self.contestants

    def _failed(self, name: str, error: Exception) -> None:
        """Only one of xds is a wrong case."""
        traceback.print_exc()
        first = (str(error).strip() or "no message").splitlines()[0][:200]
        if name.startswith("xds"):
            text = f"{type(error).__name__}: {first}"
            common.record(case=f"{name}, {self.batch.numel()} tokens", ok=False, text=text)

    def drop(self, name: str) -> None:
        """Free one."""
        self.contestants.pop(name).end()

    def run(self, base: str, batch: Tensor, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
        """Seconds a step, of all and of the host alone, for each round; the ratios over `base`."""
        rounds = min(rounds, 2) if IS_TINY else rounds
        seconds: dict[str, list[float]] = {name: [] for name in self.contestants}
        host: dict[str, list[float]] = {name: [] for name in self.contestants}
        for turn in range(-1, rounds):  # the first one takes what the size of the batch needs
            for name in list(seconds) if turn % 2 else list(reversed(seconds)):
                print(f"# {name}: timed", flush=True)
                each = self.contestants[name]
                each.batch = batch
                try:
                    on_host, whole = _turn(each.step, steps, each.finish)
                except Exception as error:
                    self._failed(name, error)
                    del seconds[name]
                    continue
                if turn >= 0:
                    host[name].append(on_host)
                    seconds[name].append(whole)
            if turn > 0 and common.left() < 10:
                break
        tokens, wanted = batch.shape[0] * self.shape.context, seconds.get(base)
        found = {}
        for name, taken in seconds.items():
            rate = tokens / statistics.median(taken)
            share = self.shape.flops(1) * rate / self.flops_a_second
            found[name] = {"seconds": taken, "host_seconds": host[name]}
            found[name] |= {"tokens_a_second": rate, "matrix_share": share}
            if wanted:
                ratios = [a / b for a, b in zip(taken, wanted, strict=True)]
                found[name]["ratio"] = statistics.median(ratios)
        return found


def _turn(
    step: Callable[[], Any], steps: int, finish: Callable[[], None] = common.synchronize
) -> tuple[float, float]:
    """Seconds a step: of the host, and until all has finished."""
    finish()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    host = time.perf_counter() - start
    finish()
    return host / steps, (time.perf_counter() - start) / steps


def matrix_rate() -> float:
    """Operations a second of a bf16 product of 8192 x 8192 matrices: the median of 7 groups."""
    width = 64 if IS_TINY else 8192
    a, b = (torch.randn(width, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    found = [_turn(lambda: torch.matmul(a, b), 10)[1] for _ in range(9)]
    return 2 * width**3 / statistics.median(found[2:])  # the clock of an idle card is low


# ---- contestants -----------------------------------------------------------------------------


def plain(this: Contestant, *, compiles: bool = False, recomputes: bool = False) -> Step:
    """A bf16 model with fp32 masters and few launches: copies of all tensors at once, fused AdamW."""
    model = this.model(recomputes=recomputes)
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in params]
    for param, master in zip(params, masters, strict=True):
        param.grad, master.grad = torch.zeros_like(param), torch.zeros_like(master)
    narrow, wide = [p.grad for p in params], [m.grad for m in masters]
    optimizer = torch.optim.AdamW(masters, **ADAM)
    _compile_blocks(model, compiles)

    def step() -> Tensor:
        loss: Tensor = model(this.batch)
        loss.backward()
        with torch.no_grad():
            torch._foreach_copy_(wide, narrow)
            nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
            optimizer.step()
            torch._foreach_copy_(params, masters)
            torch._foreach_zero_(narrow)
        return loss.detach()

    return step


def amp(this: Contestant) -> Step:
    """torch.autocast over a model in fp32."""
    return _torch_loop(this, this.model(torch.float32), autocasts=True)


def fsdp2(this: Contestant, *, compiles: bool = False) -> Step:
    """fully_shard of each block and of the rest, with fp32 reductions as in xds."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = this.model(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _compile_blocks(model, compiles)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return _torch_loop(this, model, autocasts=False)


def _torch_loop(this: Contestant, model: nn.Module, *, autocasts: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)

    def step() -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocasts):
            loss: Tensor = model(this.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _compile_blocks(model: Any, compiles: bool) -> None:
    for block in model.blocks if compiles else ():
        block.compile(backend="inductor" if IS_CUDA else "eager")


def xds(this: Contestant, *, stage: int, zero: Any = None, **more: Any) -> Step:
    """The engine; `more` replaces sections of its config."""
    from xds import initialize

    settings = common.config("bf16", stage, zero=zero, **more)
    settings["train_micro_batch_size_per_gpu"] = len(this.batch)
    this.engine = initialize(this.model(), settings)
    return _engine_loop(this)


def deepspeed(this: Contestant, *, stage: int, on_host: bool = False) -> Step:
    """DeepSpeed with torch's fused Adam, or with its own Adam on the host."""
    from deepspeed import initialize

    adam = ADAMW if on_host else ADAMW | {"torch_adam": True, "fused": IS_CUDA}
    settings = common.config("bf16", stage, optimizer={"type": "AdamW", "params": adam})
    settings |= {"train_micro_batch_size_per_gpu": len(this.batch), "steps_per_print": 10**9}
    settings.pop("ops", None)
    if on_host:
        host = {"device": "cpu", "pin_memory": True}
        settings["zero_optimization"]["offload_optimizer"] = host
    model = this.model(recomputes=on_host)
    this.engine, *_ = initialize(model=model, config=settings, dist_init_required=False)
    return _engine_loop(this)


def _engine_loop(this: Contestant) -> Step:
    def step() -> Tensor:
        engine: Any = this.engine
        loss: Tensor = engine(this.batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _has_deepspeed() -> bool:
    """Whether DeepSpeed itself was carried, not the folder of xds that has its names."""
    found = importlib.util.find_spec("deepspeed")
    return found is not None and not str(found.origin).startswith(str(common.ROOT))


# ---- parts -----------------------------------------------------------------------------------


def eager() -> None:
    """355M at both numbers of tokens; peaks against FSDP2."""
    race = Race(MEDIUM, MANY)
    race.add("plain", plain)
    for stage in (0, 2, 3):
        race.add(f"xds {stage}", xds, stage=stage)
    race.add("xds 0, torch's ops", xds, stage=0, ops={"native": False})
    race.add("FSDP2", fsdp2)
    race.add("torch AMP", amp)
    for stage in (1, 3) if _has_deepspeed() else ():
        race.add(f"DeepSpeed {stage}", deepspeed, stage=stage)
    peaks = {name: each.peak_bytes for name, each in race.contestants.items()}
    for column, sequences, steps in (("8,192 tokens", MANY, 3), ("2,048 tokens", FEW, 5)):
        _show(column, race.run("plain", race.draw(sequences), 7, steps))
    for name, peak in peaks.items():
        over = f" ({peak / peaks['FSDP2']:.2f})" if peaks.get("FSDP2") else ""
        figure(MEDIUM_TABLE, name, "peak GB (over FSDP2)", f"{peak / 1e9:.1f}{over}", bytes=peak)


def compiled(column: str, sequences: int) -> None:
    """355M with compiled blocks."""
    race = Race(MEDIUM, sequences)
    section = {"enabled": True} | ({} if IS_CUDA else {"backend": "eager"})
    race.add("plain", plain, compiles=True)
    for stage in (0, 3, 2):
        race.add(f"xds {stage}", xds, stage=stage, compile=section)
    race.add("FSDP2", fsdp2, compiles=True)
    _show(column, race.run("plain", race.batch, 7, 4))


def _show(column: str, found: dict[str, dict[str, Any]]) -> None:
    for name, samples in found.items():
        text = f"{1e3 * statistics.median(samples['seconds']):.1f}"
        if "ratio" in samples:
            text += f" ({samples['ratio']:.2f})"
        figure(MEDIUM_TABLE, name, column, text, **samples)


def offload() -> None:
    """1.3B: each way on the host takes turns with the engine that has all on the device."""
    host: dict[str, Any] = {"device": "cpu"}
    ways: dict[str, tuple[int, Any]] = {
        "xds 2, optimizer on host": (2, {"offload_optimizer": host}),
        "xds 3, parameters too": (3, {"offload_optimizer": host, "offload_param": host}),
        "xds 2, overlap_step": (2, {"offload_optimizer": host | {"overlap_step": True}}),
        "xds 2, super_offload": (2, {"offload_optimizer": host | {"super_offload": True}}),
        "xds 3, parameters alone": (3, {"offload_param": host}),
    }
    race = Race(LARGE, 16)
    race.add(ON_DEVICE, xds, stage=2, activation_checkpointing={})
    if race.add("plain", plain, recomputes=True):
        _show_large(race, ON_DEVICE, ON_DEVICE, "plain")
        race.drop("plain")
    for name, (stage, zero) in ways.items():
        if common.left() < 15:
            common.record(case=name, ok=False, text="not run: no time was left")
        elif race.add(name, xds, stage=stage, zero=zero, activation_checkpointing={}):
            _show_large(race, ON_DEVICE, name)
            race.drop(name)


def deepspeed_offload() -> None:
    """1.3B with DeepSpeed's optimizer on the host, in turns with that of xds."""
    race, host = Race(LARGE, 16), {"offload_optimizer": {"device": "cpu"}}
    ours, theirs = "xds 2, optimizer on host", "DeepSpeed 2, optimizer on host"
    race.add(ours, xds, stage=2, zero=host, activation_checkpointing={})
    if race.add(theirs, deepspeed, stage=2, on_host=True):
        _show_large(race, ours, theirs)


def _show_large(race: Race, base: str, *names: str) -> None:
    found = race.run(base, race.batch, 3, 2)
    for name in [name for name in names if name in found]:
        samples, peak = found[name], race.contestants[name].peak_bytes
        text = f"{1e3 * statistics.median(samples['seconds']):.0f}"
        if "ratio" in samples:
            text += f" ({samples['ratio']:.2f}{'' if base == ON_DEVICE else ' of xds'})"
        figure(LARGE_TABLE, name, "ms (over all on device)", text, **samples)
        figure(LARGE_TABLE, name, "tokens/s", f"{samples['tokens_a_second']:,.0f}")
        figure(LARGE_TABLE, name, "matrix share", f"{samples['matrix_share']:.2f}")
        figure(LARGE_TABLE, name, "peak GB", f"{peak / 1e9:.1f}", bytes=peak)


def host_update() -> None:
    """GB/s of the update on the host, 28 bytes a parameter: the kernel alone, and a step of the engine."""
    layers, width = (2, 64) if IS_TINY else (12, 4096)
    numel, cores = layers * width**2, len(os.sched_getaffinity(0))
    table = f"host update, {numel / 1e6:.0f}M parameters: GB/s by threads"
    counts = sorted({max(1, cores // 4), max(1, cores // 2), max(1, cores - 2), cores})
    for row, column, found in (
        *(("kernel alone", str(n), _kernel_seconds(numel, n)) for n in counts),
        ("engine.step()", "default", _engine_seconds(layers, width, {})),
        *(
            (
                "engine.step()",
                str(n),
                _engine_seconds(layers, width, {"cpuadam_cores_perc": n / cores}),
            )
            for n in counts
        ),
    ):
        rate = 28 * numel / statistics.median(found) / 1e9
        figure(table, row, column, f"{rate:.1f}", seconds=found)


def _kernel_seconds(numel: int, threads: int) -> list[float]:
    from xds.ops import libraries
    from xds.ops.kernels.adam import adam_

    libraries.load("cpu", require=IS_NATIVE)
    # memory that was only zeroed is no memory
    master, mean, square = (torch.ones(numel) for _ in range(3))
    grad, out = (torch.ones(numel, dtype=torch.bfloat16) for _ in range(2))
    tensors = (master, grad, mean, square, out, torch.tensor(1.0), None, None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found = []
    for _ in range(5):
        start = time.perf_counter()
        adam_(*tensors, 1e-3, 0.9, 0.95, 1e-8, 0.1, True, True)
        found.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    return found[1:]


def _engine_seconds(layers: int, width: int, section: dict[str, Any]) -> list[float]:
    """Seconds of `engine.step()` after the device has finished backward: norm, update, and copies back."""
    from xds import initialize

    with torch.device(DEVICE):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    zero = {"offload_optimizer": {"device": "cpu", **section}}
    engine = initialize(model.bfloat16(), common.config("bf16", 2, zero=zero))
    x, found = torch.randn(8, width, device=DEVICE, dtype=torch.bfloat16), []
    for _ in range(5):
        engine.backward(engine(x).square().mean())
        found.append(_turn(engine.step, 1)[1])
    engine.destroy()
    return found[1:]


def host_time() -> None:
    """355M at few tokens: time of the host, Python calls, kernels and waits of a step."""
    race, steps = Race(MEDIUM, FEW), 5
    race.add("plain", plain)
    for stage in (3,) if IS_REHEARSED else (0, 2, 3):
        race.add(f"xds {stage}", xds, stage=stage)
    for name, each in race.contestants.items():
        host = _turn(each.step, steps)[0]
        profile = cProfile.Profile()
        profile.runcall(_turn, each.step, steps)
        stats = pstats.Stats(profile)
        print(f"## {name}", flush=True)
        stats.sort_stats("tottime").print_stats(25)
        calls = stats.total_calls / steps  # type: ignore[attr-defined]
        numbers = {"host ms": 1e3 * host, "Python calls": calls, **_device_events(each.step)}
        for column, number in numbers.items():
            text = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
            figure(HOST_TABLE, name, column, text, value=number)


def _device_events(step: Step) -> dict[str, int]:
    """Kernels and copies that one step starts, and how often the host waits."""
    with torch.profiler.profile() as profiler:
        step()
        common.synchronize()
    events = profiler.events()
    on_device = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum("emcpy" in name for name in on_device)
    waits = sum("Synchronize" in event.name for event in events)
    return {"kernels": len(on_device) - copies, "copies": copies, "waits": waits}


def build_peer() -> None:
    """DeepSpeed's Adam for the host: it compiles for a minute."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)
    figure("DeepSpeed", "its Adam for the host", "", "built")


def start_group() -> None:
    """A group of one rank, as FSDP2 and DeepSpeed need."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl" if IS_CUDA else "gloo")


PARTS: dict[str, Callable[[], None]] = {
    "eager": eager,
    "compiled, 8,192": lambda: compiled("8,192 compiled", MANY),
    "compiled, 2,048": lambda: compiled("2,048 compiled", FEW),
    "1.3B offload": offload,
    "1.3B deepspeed": deepspeed_offload,
    "host update": host_update,
    "host time": host_time,
    "deepspeed build": build_peer,
}

if __name__ == "__main__":
    logging.getLogger("xds").setLevel(logging.ERROR)
    start_group()
    PARTS[sys.argv[1]]()
    dist.destroy_process_group()
    print(json.dumps({"part": sys.argv[1]}))
