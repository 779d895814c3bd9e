"""`FlopsProfiler` and `get_model_profile`: DeepSpeed's names over the profiler of the engine.

What is counted, and how it differs from DeepSpeed's counts: docs/design/profiling.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ....utils.arguments import wrong
from ....utils.errors import UsageError
from ...profiling.clock import clock_of
from ...profiling.profile import Number, Profile
from ...profiling.recorder import Recorder
from ...profiling.steps import write
from ...profiling.text import Detail, Setting, report
from ...profiling.units import (
    PRECISION,
    duration_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

DEFAULT_PRECISION = PRECISION


@final
class FlopsProfiler:
    """Counts the forwards of `model` between `start_profile` and `stop_profile`.

    Nothing is written on the model or its modules. The figures stay after `end_profile`.
    """

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        """ds_engine: its numbers of ranks are printed. recompute_fwd_factor: for the printed estimate."""
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._recorder: Recorder | None = None
        self._ignored: Collection[type[nn.Module]] = ()
        self._taken: Callable[[], Profile | None] = lambda: None

    @classmethod
    def of_engine(cls, engine: Any, factor: float) -> FlopsProfiler:
        """`engine.flops_profiler`: it also has what the engine itself has profiled."""
        made = cls(engine.module, engine, factor)
        made._taken = engine.flops_profile
        return made

    # -- when it counts -----------------------------------------------------------------------------------

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Forget what was counted, and count from now on.

        Args:
            ignore_list: classes of modules that are not counted apart; their work is their parent's.
        """
        self._stop()
        self._ignored = tuple(ignore_list or ())
        self._recorder = self._new()
        self._recorder.start()
        self.started = True

    def stop_profile(self) -> None:
        """Count no more."""
        self._stop()

    def reset_profile(self) -> None:
        """Forget what was counted."""
        if self._recorder is not None:
            is_counting = self._recorder.is_started
            self._stop()
            self._recorder = self._new()
            if is_counting:
                self._recorder.start()

    def end_profile(self) -> None:
        """Count no more, and print no more."""
        self._stop()
        self.started = False

    def _new(self) -> Recorder:
        device = next((param.device for param in self.model.parameters()), torch.device("cpu"))
        return Recorder(self.model, clock_of(device), self._ignored)

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()

    # -- what it counted ----------------------------------------------------------------------------------

    def _found(self) -> Profile:
        profile = self._taken() if self._recorder is None else self._recorder.profile()
        if profile is None:
            raise UsageError(
                "the flops profiler has counted nothing yet: call start_profile(), or wait for the step of "
                "flops_profiler.profile_step in the config"
            )
        return profile

    @property
    def flops(self) -> Number:
        """`get_total_flops()`."""
        return self._found().flops

    @property
    def macs(self) -> Number:
        """`get_total_macs()`."""
        return self._found().macs

    @property
    def params(self) -> int:
        """`get_total_params()`."""
        return self._found().params

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Floating-point operations of forward; of a step of the engine, those of one micro-batch."""
        return number_to_string(self.flops) if as_string else self.flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulates of forward."""
        return macs_to_string(self.macs) if as_string else self.macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of forward, with the time that counting takes."""
        seconds = self._found().root.seconds
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of this rank's model: whole ones, also where ranks have shards."""
        return params_to_string(self.params) if as_string else self.params

    # -- what it prints -----------------------------------------------------------------------------------

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the sums, the modules that take most, and the tree. Nothing before `start_profile`.

        Args:
            profile_step: printed as the number of the step.
            module_depth: the depth down to which modules are printed; -1: all.
            top_modules: classes of modules at each depth.
            detailed: print the tree.
            output_file: write this file instead.
        """
        if not self.started:
            return
        factor = self.recompute_fwd_factor if self.ds_engine is not None else None
        setting = Setting(profile_step, self._places(), recompute_factor=factor)
        detail = Detail(module_depth, top_modules, detailed)
        write(report(self._found(), setting, detail), output_file)

    def _places(self) -> Mapping[str, object]:
        engine = self.ds_engine
        if engine is None:
            return {}
        data = engine.dp_world_size
        if data is None:  # with sequence ranks: DeepSpeed's engine has this number instead
            data = engine.seq_dp_world_size
        return {
            "world size": engine.world_size,
            "data parallel size": data,
            "model parallel size": engine.mp_world_size,
            "batch size per GPU": engine.train_micro_batch_size_per_gpu(),
        }


def get_model_profile(  # noqa: PLR0913 (DeepSpeed's arguments)
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(FLOPs, MACs, parameters) of one call of `model` in evaluation mode; its mode is restored.

    Args:
        input_shape: the model is called with one tensor of this shape, in the dtype of its parameters.
        args, kwargs: or with these.
        warm_up: calls before the one that is counted.
        as_string: return text.
        ignore_modules: as `start_profile`.
        mode: "forward", or "generate" for the model's method of that name.
    Raises:
        UsageError: a wrong argument, or none to call the model with.
    """
    if not isinstance(model, nn.Module):
        raise wrong("get_model_profile: model", model, "a torch.nn.Module")
    if mode not in ("forward", "generate"):
        raise wrong("get_model_profile: mode", mode, '"forward" or "generate"')
    if input_shape is not None:
        args = [_input(model, input_shape)]
    if not args and not kwargs:
        raise UsageError(
            "get_model_profile needs input_shape, args or kwargs to call the model with"
        )
    profiler = FlopsProfiler(model)
    call: Any = model if mode == "forward" else model.generate
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for _ in range(warm_up):
            call(*args, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        call(*args, **(kwargs or {}))
        profiler.stop_profile()
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    finally:
        profiler.end_profile()
        for module, was_training in modes.items():
            module.training = was_training
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


def _input(model: nn.Module, shape: Any) -> Tensor:
    if not isinstance(shape, tuple) or not shape:
        raise wrong("get_model_profile: input_shape", shape, "a tuple with at least one number")
    like = next(model.parameters(), torch.empty(0))
    return torch.ones(shape, dtype=like.dtype, device=like.device)
