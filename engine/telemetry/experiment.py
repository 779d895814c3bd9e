"""An experiment of a tuner: the engine times some steps by the wall clock, writes them, and ends the run.

Every rank ends with exit code 0 after the same step. So a script that trains for days can be tried unchanged.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...ops.device import Accelerator, device_of
from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.small_files import replace_small_file
from ..config.config import Config
from ..profiling.recorder import Recorder

METRICS, MODEL_INFO = "autotuning_metric.json", "autotuning_model_info.json"


@final
class Experiment:
    """Times the steps after `start_profile_step` up to `end_profile_step`.

    With the metric flops the first step counts operations. It is slow, and not among those that are timed.
    """

    def __init__(self, config: Config, model: nn.Module, collectives: Collectives) -> None:
        self._section, self._config = config.autotuning, config
        self._collectives = collectives
        self._recorder = Recorder(model) if config.autotuning.metric == "flops" else None
        self._flops = 0.0  # of a step on this rank
        self._steps = 0
        self._begin_seconds = 0.0

    def begin(self) -> None:
        """See `AfterSteps` of parts.py."""
        if self._recorder is not None:
            self._recorder.start()
        self._mark()

    def resume(self, step: int) -> None:
        """See `AfterSteps` of parts.py. Steps of this process count, whatever was loaded."""
        return

    def advance(self, step: int) -> None:
        """See `AfterSteps` of parts.py. Raises SystemExit after the last timed step."""
        section = self._section
        self._steps += 1
        self._count()
        if self._steps == section.start_profile_step:
            self._mark()
        if self._steps == section.end_profile_step:
            begin_seconds = self._begin_seconds
            self._mark()
            seconds = (self._begin_seconds - begin_seconds) / (
                section.end_profile_step - section.start_profile_step
            )
            samples = self._config.train_batch_size
            metrics = {
                "latency": 1000 * seconds,
                "throughput": samples / seconds,
                "train_batch_size": samples,
                "peak_bytes": int(
                    self._of_ranks(device_of(self._collectives.device).memory().peak_bytes).max()
                ),
            }
            if section.metric == "flops":
                metrics["FLOPS_per_gpu"] = float(self._of_ranks(self._flops).mean()) / seconds
            self._end(section.metric_path or METRICS, "autotuning.metric_path", metrics)

    def _count(self) -> None:
        """The operations of the first step. A backward counts as two forwards, as DeepSpeed does."""
        if self._recorder is not None:
            self._recorder.stop()
            self._flops = 3.0 * self._recorder.profile(1).flops
            self._recorder = None

    def _mark(self) -> None:
        """The device has done what came before."""
        device_of(self._collectives.device).synchronize()
        self._begin_seconds = time.perf_counter()

    def _of_ranks(self, value: float) -> Tensor:
        mine = torch.tensor([float(value)], dtype=torch.float64)
        return self._collectives.gather_small(mine.to(self._collectives.device))

    def _end(self, path: str, key: str, values: dict[str, Any]) -> None:
        if self._collectives.rank == 0:
            write_result(path, key, {**values, "rank": 0})
        raise SystemExit(0)


@final
class ModelProfile:
    """Writes the number of parameters, and the bytes that the first forward keeps for its backward."""

    def __init__(self, config: Config, model: nn.Module, collectives: Collectives) -> None:
        self._section, self._model, self._collectives = config.autotuning, model, collectives
        self._numel = [(param.numel(), param.requires_grad) for param in model.parameters()]
        self._seen = {_memory(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._kept_bytes = 0

    def begin(self) -> None:
        """See `AfterSteps` of parts.py."""
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept)
        self._model.register_forward_pre_hook(lambda *_: self._hooks.__enter__())
        self._model.register_forward_hook(lambda *_: self._end())

    def advance(self, step: int) -> None:
        """See `AfterSteps` of parts.py. Nothing: no step is reached."""
        return

    def resume(self, step: int) -> None:
        """See `AfterSteps` of parts.py."""
        return

    def _save(self, tensor: Tensor) -> Tensor:
        if _memory(tensor) not in self._seen:
            self._seen.add(_memory(tensor))
            self._kept_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def _end(self) -> None:
        self._hooks.__exit__(None, None, None)
        if self._collectives.rank == 0:
            values = {
                "num_params": sum(numel for numel, _ in self._numel),
                "trainable_num_params": sum(numel for numel, trains in self._numel if trains),
                "activation_mem_per_gpu": self._kept_bytes,
                "memory_per_gpu": _total_bytes(self._collectives.device),
                "world_size": self._collectives.world_size,
                "rank": 0,
            }
            path = self._section.model_info_path or MODEL_INFO
            write_result(path, "autotuning.model_info_path", values)
        raise SystemExit(0)


def build_experiment(
    config: Config, model: nn.Module, collectives: Collectives
) -> Experiment | ModelProfile:
    """What the section autotuning asks for."""
    if config.autotuning.profiles_model:
        return ModelProfile(config, model, collectives)
    return Experiment(config, model, collectives)


def write_result(path: str, key: str, values: dict[str, Any]) -> None:
    """Write JSON. Raises UsageError: the file cannot be written; `key` names it."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_small_file(Path(path), json.dumps(values, indent=1).encode())
    except OSError as error:
        raise UsageError(
            f"{key} = {printable(path)}: {error.strerror}; name a file that can be written"
        ) from None


def _total_bytes(device: torch.device) -> int:
    """Memory of the device; on a CPU this rank's part of the host's."""
    found = device_of(device)
    if isinstance(found, Accelerator):
        return found.free_and_total_bytes()[1]
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


__all__ = ["Experiment", "ModelProfile", "build_experiment", "write_result"]
