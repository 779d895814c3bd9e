"""What each rank of `xds bench machine` runs: measures the numbers of a machine file, all ranks at once.

Products, attention and other kernels are those of models, seen on the meta device and called again with values.
Ranks that share a host share its memory and its links, so all of them measure at the same time.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from itertools import pairwise, product
from math import exp, log
from pathlib import Path
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from ..engine.config.config import parse_config
from ..engine.data.batches import call_with, loss_of, move
from ..engine.planning.machine import parse_machine
from ..engine.planning.models import ModelSource, model_source
from ..engine.planning.observing import kernel_calls
from ..engine.planning.work import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MATRIX,
    OTHER,
    Call,
    Kernel,
    kernel_of,
)
from ..engine.process.process import join, pick_device
from ..ops.comm.collectives import Collectives
from ..ops.comm.exchange import host_numbers
from ..ops.comm.opening import open_collectives
from ..ops.device import accelerator_of, device_of
from ..ops.kernels.adam import adam_
from ..ops.libraries import BuildError, load, optimizer_library
from ..ops.torch_internals import TorchDispatchMode, tree_leaves, tree_map
from ..utils.small_files import replace_small_file
from .bench import BenchPlan, MachinePlan
from .bench_ranks import Bench

ROUNDS = 3
ROUND_SECONDS = 0.02  # calls of a round together, about
MOST_CALLS = 10_000
PASSES = 9  # over the kernels of a model
SOURCE_SECONDS = 10.0  # of the passes of one model, about, and of the calls of one product
MOST_BYTES = 1 << 28  # of the tensors of one call; larger ones are left out
UPDATED_NUMEL = 1 << 22
LINK_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
MEMORY_POWERS = range(12, 25, 2)  # elements of fp32 tensors, as powers of 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST_BYTES, LARGEST_BYTES = 1 << 10, 1 << 24
HOST_SQUARES, SQUARES = (128, 512, 1024, 2048), (512, 1024, 2048, 4096, 8192)
HOST_WIDTHS, WIDTHS = (256, 512), (1024, 4096)  # of samples


Points = dict[str, dict[tuple[float, ...], list[float]]]  # by name: coordinates -> values


def run_rank(plan: MachinePlan) -> None:
    """Run one rank. Rank 0 writes the file."""
    device = torch.device("cpu") if os.environ.get("XDS_BACKEND") == "gloo" else pick_device()
    group = join(device)
    where = open_collectives(group, device)
    meter = Meter(where, group, device)
    begin = time.perf_counter()
    machine = meter.machine(plan, sources_of(plan, device))
    if where.rank == 0:
        replace_small_file(plan.output, json.dumps(machine, indent=1))
        seconds = time.perf_counter() - begin
        print(
            f"{plan.output}: {parse_machine(machine).name}, measured in {seconds:.0f} s", flush=True
        )


def sources_of(plan: MachinePlan, device: torch.device) -> list[ModelSource]:
    """The models whose kernels are measured."""
    if plan.models:
        return [model_source(name, plan.sequence_length) for name in plan.models]
    widths = WIDTHS if device_of(device).runs_ahead else HOST_WIDTHS
    return [Sample(width) for width in widths]


@final
class Meter:
    """Measures. All ranks call the methods alike."""

    def __init__(self, where: Collectives, group: Any, device: torch.device) -> None:
        self._where, self._group, self._device = where, group, device
        self._on = device_of(device)
        self._errors: list[float] = []

    def machine(self, plan: MachinePlan, sources: Sequence[ModelSource]) -> dict[str, Any]:
        """The contents of a machine file, the same on all ranks."""
        kernels = self._kernels(plan, sources)
        hosts = host_numbers(self._where)
        on_host = hosts.count(hosts[0])
        device = self._device.type
        found: dict[str, Any] = {
            "name": plan.name or (self._on.name if self._on.runs_ahead else platform.machine()),
            "device": device,
            "devices_per_host": on_host,
            "date": date.today().isoformat(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "device_bytes": _number(self._device_bytes(on_host), 0.0, "read"),
            "host_bytes": _number(_host_bytes(), 0.0, "read"),
            **kernels,
            "memory": self._memory(),
            "launch": self._launch(),
            "update": self._update(torch.device("cpu")),
            **self._copies(),
            **(self._disk(plan.disk) if plan.disk else {}),
            "links": self._links(hosts),
        }
        if self._on.runs_ahead:
            found["device_update"] = self._update(self._device)
        return found

    # -- time -------------------------------------------------------------------------------------------

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call with all ranks at work: the mean over ranks of their medians of rounds."""
        call()
        self._finish()
        number = 1
        while number < MOST_CALLS:
            spent = self._mean(self._timed(call, number))
            if spent > ROUND_SECONDS / 2:
                break
            number = min(int(number * max(2, ROUND_SECONDS / spent)), MOST_CALLS)
        rounds = [self._timed(call, number) / number for _ in range(ROUNDS)]
        middle = statistics.median(rounds)
        self._errors.append((max(rounds) - min(rounds)) / middle / 2)
        return self._mean(middle)

    def _timed(self, call: Callable[[], object], number: int) -> float:
        self._where.barrier()
        start = time.perf_counter()
        for _ in range(number):
            call()
        self._finish()
        return time.perf_counter() - start

    def _finish(self) -> None:
        self._on.synchronize()

    def _device_bytes(self, on_host: int) -> float:
        if self._on.reports_memory:
            return float(accelerator_of(self._device).free_and_total_bytes()[1])
        return _host_bytes() / on_host

    def _mean(self, value: float) -> float:
        own = torch.tensor([value], dtype=torch.float64, device=self._device)
        return float(self._where.gather_small(own).mean())

    def _is_over(self, begin_seconds: float) -> bool:
        """Whether the time of one source is over, on all ranks alike."""
        return self._mean(time.perf_counter() - begin_seconds) > SOURCE_SECONDS

    def _error(self) -> float:
        """The median error of what was measured since the last call."""
        errors, self._errors = self._errors, []
        return round(min(self._mean(statistics.median(errors or [0.0])), 1.0), 4)

    # -- kernels ----------------------------------------------------------------------------------------

    def _kernels(self, plan: MachinePlan, sources: Sequence[ModelSource]) -> dict[str, Any]:
        """The tables of products, attention and other kernels."""
        tables: dict[str, Points] = {
            name: {} for name in ("matrix", "attention", "attention_backward", "kernels")
        }
        # A CPU may lack instructions for a dtype. Then its larger samples would take many minutes.
        slow: set[str] = set()
        for source, size, dtype in product(sources, plan.micro_batches, plan.dtypes):
            if dtype in slow:
                continue
            begin = time.perf_counter()
            found = self._in_model(source, size, DTYPES[dtype])
            if found is None:
                config = {"train_micro_batch_size_per_gpu": size}
                on = {} if dtype == "fp32" else {dtype: {"enabled": True}}
                found = self._in_sequence(kernel_calls(source, parse_config({**config, **on})))
            _sort(found, tables)
            if not plan.models and self._is_over(begin):
                slow.add(dtype)
        for dtype in plan.dtypes:
            self._squares(dtype, tables["matrix"])
        error = self._error()
        return {
            key: {name: _table(points, error) for name, points in by_name.items()}
            for key, by_name in tables.items()
        }

    def _squares(self, dtype: str, matrix: Points) -> None:
        """Products of square matrices, up to one that takes long: the next one has eight times the work."""
        for size in SQUARES if self._on.runs_ahead else HOST_SQUARES:
            begin = time.perf_counter()
            sides = (torch.rand(size, size, device=self._device) for _ in range(2))
            left, right = (side.to(DTYPES[dtype]) for side in sides)
            seconds = self.seconds(lambda a=left, b=right: torch.mm(a, b))  # type: ignore[misc]
            _add(matrix, dtype, (size, size, size), 2 * size**3 / seconds)
            if self._is_over(begin):
                break

    def _in_model(
        self, source: ModelSource, micro_batch: int, dtype: torch.dtype
    ) -> dict[Kernel, float] | None:
        """Seconds of each kernel where it is: in forward and backward of the model. None: it does not fit."""
        numel = sum(param.numel() for param in source.on_meta().parameters())
        activations = 4 * numel  # a guess; what is kept of a small batch is less
        if numel * dtype.itemsize * 2 + activations > self._device_bytes(2) / 2:
            return None
        torch.manual_seed(0)
        model = source.build().to(self._device, dtype)
        batch = move(source.batch(micro_batch), self._device, dtype)
        if batch is None:
            return None
        timer = KernelTimer(self._device)
        begin = time.perf_counter()
        for number in range(PASSES):
            if number > 1 and self._is_over(begin):
                break
            self._where.barrier()
            if number == 1:
                timer.forget()
            with timer:
                loss_of(call_with(model, batch)).backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
            timer.end_pass()
        own = timer.seconds()
        self._errors.append(timer.error)
        table = torch.tensor(list(own.values()), dtype=torch.float64, device=self._device)
        return dict(zip(own, self._where.gather_small(table).mean(0).tolist(), strict=True))

    def _in_sequence(self, calls: Mapping[Kernel, Call]) -> dict[Kernel, float]:
        """Seconds of each kernel, among the others: with inputs that are not in a cache, as in a training."""
        replays: dict[Kernel, Callable[[], object]] = {}
        for kernel, call in calls.items():
            if kernel.size_bytes <= MOST_BYTES:
                with suppress(RuntimeError, TypeError, IndexError):  # values that it cannot have
                    again = replay(kernel, call, self._device)
                    again()
                    replays[kernel] = again
        passes = []
        for _ in range(PASSES):
            self._where.barrier()
            passes.append(self._one_pass(list(replays.values())))
        table = torch.tensor(passes, dtype=torch.float64).median(0).values
        spread = torch.tensor(passes).std(0) / table
        self._errors.append(float(spread.median()))
        means = self._where.gather_small(table.to(self._device)).mean(0).tolist()
        return dict(zip(replays, means, strict=True))

    def _one_pass(self, replays: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds of each, one after the other."""
        events = [self._on.event(timed=True)]
        for again in replays:
            again()
            events.append(self._on.event(timed=True))
        self._finish()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]

    def _memory(self) -> dict[str, Any]:
        points: dict[tuple[float, ...], list[float]] = {}
        for power in MEMORY_POWERS:
            a, b = (torch.rand(1 << power, device=self._device) for _ in range(2))
            seconds = self.seconds(lambda a=a, b=b: torch.add(a, b))  # type: ignore[misc]
            points[(float(3 * a.nbytes),)] = [3 * a.nbytes / seconds]
        return _table(points, self._error())

    def _launch(self) -> dict[str, Any]:
        """Tiny blocks, forward and backward: what the host spends on a kernel in Python and autograd."""
        sample = Sample(64)
        model, batch = sample.build().to(self._device), sample.batch(1)[:, :8].to(self._device)

        def step() -> None:
            model(batch).backward()
            model.zero_grad()

        step_seconds = self.seconds(step)
        timer = KernelTimer(self._device)
        for _ in range(PASSES):
            with timer:
                step()
            number, seconds = timer.end_pass()
        if not self._on.runs_ahead:  # the host itself runs the kernels
            step_seconds = max(step_seconds - self._mean(seconds), step_seconds / 10)
        return _number(step_seconds / number, self._error())

    def _update(self, device: torch.device) -> dict[str, Any]:
        """The optimizer's kernel of xds, fp32."""
        try:
            if library := optimizer_library(device):
                load(library)
        except BuildError:
            pass  # then the reference runs, as in a training
        tensors = [torch.rand(UPDATED_NUMEL, device=device) for _ in range(4)]
        step = torch.ones((), device=device)

        def update() -> None:
            adam_(*tensors, None, step, None, None, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, True)

        seconds = self.seconds(update)
        size_bytes = 7 * tensors[0].nbytes  # of three read and written, and a gradient
        return _number(size_bytes / seconds, self._error())

    def _copies(self) -> dict[str, Any]:
        if not self._on.pins_memory:
            return {}
        on_host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
        on_device = on_host.to(self._device)
        found = {}
        for key, target, source in (
            ("to_host", on_host, on_device),
            ("to_device", on_device, on_host),
        ):
            seconds = self.seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True))  # type: ignore[misc]
            found[key] = _number(on_host.nbytes / seconds, self._error())
        return found

    def _disk(self, folder: str) -> dict[str, Any]:
        """One file of each host, by its first rank, past the cache of the system."""
        size_bytes, found = 1 << 27, {}
        data = os.urandom(1 << 20) * (size_bytes >> 20)
        rates = [0.0, 0.0]
        if self._where.rank == 0:
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                start = time.perf_counter()
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                rates[0] = size_bytes / (time.perf_counter() - start)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                Path(file.name).read_bytes()
                rates[1] = size_bytes / (time.perf_counter() - start)
        for key, rate in zip(("disk_write", "disk_read"), rates, strict=True):
            own = torch.tensor([rate], dtype=torch.float64, device=self._device)
            found[key] = _number(float(self._where.gather_small(own)[0]), 0.2)
        return found

    # -- links ------------------------------------------------------------------------------------------

    def _links(self, hosts: Sequence[int]) -> dict[str, Any]:
        """Groups of 2, 4, ... neighbouring ranks of a host, and of one rank on each host."""
        ranks, own_host = range(len(hosts)), hosts[self._where.rank]
        on_host = hosts.count(hosts[0])
        found: dict[str, Any] = {}
        sizes = [2**power for power in range(1, 20) if 2**power < on_host] + [on_host]
        if on_host > 1:
            by_size = [
                [[r for r in ranks][first : first + size] for first in range(0, len(hosts), size)]
                for size in sizes
                if size > 1
            ]
            found["host"] = self._of_place(by_size)
        if len(set(hosts)) > 1 and own_host is not None:
            places = [[r for r in ranks if hosts[r] == host] for host in dict.fromkeys(hosts)]
            columns = [list(column) for column in zip(*places, strict=False)]
            found["hosts"] = self._of_place([columns])
        return found

    def _of_place(self, by_size: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
        rates: Points = {}
        latencies: Points = {}
        overlaps: dict[str, float] = {}
        for groups in by_size:
            bench, group = self._bench_of(groups)
            for row in bench.rows(ways=("xds",)):
                name = "send" if row.op == "send_recv" else row.op
                sent = row.bus_bytes_per_second * row.seconds
                key = float(group.world_size)
                if row.size_bytes <= SMALLEST_BYTES:
                    _add(latencies, name, (key,), row.seconds)
                else:
                    rest = max(row.seconds - latencies[name][key,][0], row.seconds / 10)
                    _add(rates, name, (key, round(sent)), sent / rest)
            overlaps = {name: bench.overlap(name) for name in ("all_gather", "reduce_scatter")}
        middle = round(statistics.mean(overlaps.values()), 3)
        return {
            name: {
                "latency": _table(latencies[name], 0.2),
                "rate": _table(rates[name], 0.1),
                "overlap": round(overlaps.get(name, middle), 3),
            }
            for name in rates
        }

    def _bench_of(self, groups: Sequence[Sequence[int]]) -> tuple[Bench, Collectives]:
        plan = BenchPlan(LINK_OPS, SMALLEST_BYTES, LARGEST_BYTES, "float32", 5, False)
        if len(groups) == 1 and len(groups[0]) == self._where.world_size:
            return Bench(self._where, self._group, plan), self._where
        made = [(dist.new_group(list(ranks)), ranks) for ranks in groups]
        own = next(group for group, ranks in made if self._where.rank in ranks)
        where = open_collectives(own, self._device)
        return Bench(where, own, plan), where


@final
class KernelTimer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times every kernel of what runs inside. error: the median relative spread of the passes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.error = 0.0
        self._on = device_of(device)
        self._pass: list[tuple[Kernel, Any, Any]] = []
        self._found: dict[Kernel, list[float]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        begin = self._on.event(timed=True)
        out = func(*args, **(kwargs or {}))
        end = self._on.event(timed=True)
        kernel = kernel_of(func, args, kwargs or {}, out)
        if kernel is not None:
            self._pass.append((kernel, begin, end))
        return out

    def end_pass(self) -> tuple[int, float]:
        """The mean of each kernel in this pass counts. Returns how many there were, and their seconds."""
        self._on.synchronize()
        times: dict[Kernel, list[float]] = {}
        for kernel, begin, end in self._pass:
            times.setdefault(kernel, []).append(begin.elapsed_time(end) / 1e3)
        for kernel, several in times.items():
            self._found.setdefault(kernel, []).append(statistics.mean(several))
        self._pass = []
        return sum(map(len, times.values())), sum(map(sum, times.values()))

    def forget(self) -> None:
        """What was timed until now was a warm-up."""
        self._found = {}

    def seconds(self) -> dict[Kernel, float]:
        """The mean of the passes: what disturbs a step disturbs some of its kernels, and never their median."""
        means = {kernel: statistics.mean(each) for kernel, each in self._found.items()}
        self.error = statistics.median(
            statistics.pstdev(each) / means[kernel] for kernel, each in self._found.items()
        )
        return means


def replay(kernel: Kernel, call: Call, device: torch.device) -> Callable[[], object]:
    """A function that launches `kernel`: `call` with tensors of the same shapes, on `device`."""
    function, args, kwargs = call
    limit = _least_size(function, args)

    def value(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return device
        return _values_like(leaf, limit, device) if isinstance(leaf, Tensor) else leaf

    given, named = tree_map(value, (args, dict(kwargs)))
    if kernel.kind in (ATTENTION, ATTENTION_BACKWARD):  # the meta device has that of CPUs only
        return _attention(kernel, given)
    if "device" in named:
        named["device"] = device
    return lambda: function(*given, **named)


def _attention(kernel: Kernel, given: Sequence[Tensor]) -> Callable[[], object]:
    is_backward = kernel.kind == ATTENTION_BACKWARD
    inputs = [each.requires_grad_() for each in given[is_backward : 3 + is_backward]]
    is_causal = bool(kernel.shape[-1])

    def attend() -> Tensor:
        query, key, value = inputs
        out: Tensor = sdpa(query, key, value, is_causal=is_causal)
        return out

    if not is_backward:
        return torch.no_grad()(attend)
    out = attend()
    return partial(torch.autograd.grad, out, inputs, torch.ones_like(out), retain_graph=True)


def _least_size(function: Any, args: Any) -> int:
    """Whole numbers among the values have to be below it: rows of a table, or classes."""
    floats = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.dim()]
    floats = [tensor for tensor in floats if tensor.is_floating_point()]
    if "embedding" in function._overloadpacket.__name__:
        rows = [arg for arg in args if type(arg) is int and arg > 1]
        return rows[0] if rows else floats[0].shape[0]
    return max(min((size for tensor in floats for size in tensor.shape), default=2), 1)


def _values_like(leaf: Tensor, limit: int, device: torch.device) -> Tensor:
    sizes = zip(leaf.shape, leaf.stride(), strict=True)
    shape = [1 if stride == 0 else size for size, stride in sizes]
    made = torch.empty_strided(shape, leaf.stride(), dtype=leaf.dtype, device=device)
    if leaf.is_floating_point():
        made.copy_(torch.empty(shape).uniform_(0.95, 1.05))  # products in place stay near 1
    elif leaf.dtype == torch.bool:
        made.fill_(True)
    else:
        made.copy_(torch.randint(limit, shape))
    return made.expand(leaf.shape)


class Sample(ModelSource):
    """Two blocks of attention, with an embedding and a loss."""

    def __init__(self, width: int) -> None:
        self.name, self._width = f"sample of width {width}", width

    def build(self) -> nn.Module:
        return _SampleModel(self._width)

    def batch(self, micro_batch_size: int) -> Any:
        return torch.zeros(micro_batch_size, self._width, dtype=torch.int64)


class _SampleBlock(nn.Module):
    """Written as models are: a module for each layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        shape = (*x.shape[:2], -1, 64)
        heads = [
            layer(y).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        query, key, value = heads
        y = sdpa(query, key, value, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(y))
        y = self.down(self.act(self.up(self.second(x))))
        return x + cast(Tensor, self.drop(y))


class _SampleModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, width)
        self.blocks = nn.ModuleList(_SampleBlock(width) for _ in range(2))
        self.head = nn.Linear(width, 8192, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        return loss


def _sort(found: Mapping[Kernel, float], tables: Mapping[str, Points]) -> None:
    """Add the rates of kernels to the tables of their kinds. found: their seconds."""
    for kernel, seconds in found.items():
        if kernel.kind == OTHER:
            rate = kernel.size_bytes / seconds
            _add(tables["kernels"], kernel.name, (kernel.size_bytes,), rate)
        elif kernel.kind == MATRIX:
            _add(tables["matrix"], kernel.dtype, kernel.shape[1:], kernel.flops / seconds)
        else:
            is_forward = kernel.kind == ATTENTION
            _, queries, _, width, _ = kernel.shape
            table = tables["attention" if is_forward else "attention_backward"]
            _add(table, kernel.dtype, (width, queries), kernel.flops / seconds)


def _add(
    tables: Points,
    name: str,
    place: tuple[float, ...],
    value: float,
) -> None:
    tables.setdefault(name, {}).setdefault(tuple(map(float, place)), []).append(value)


def _table(points: Mapping[tuple[float, ...], Sequence[float]], error: float) -> dict[str, Any]:
    """Of several values at one place the geometric mean."""
    rows = [
        [*place, float(f"{exp(sum(map(log, values)) / len(values)):.4g}")]
        for place, values in sorted(points.items())
    ]
    return {"points": rows, "source": "measured", "error": error}


def _number(value: float, error: float, source: str = "measured") -> dict[str, Any]:
    return {"value": float(f"{value:.4g}"), "source": source, "error": error}


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    run_rank(MachinePlan(**json.loads(sys.argv[1])))
