"""The engine that `xds.init_inference` returns: forward, generate, and times of forwards."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from ...ops.comm.collectives import Collectives
from ...ops.device import device_of, keeping_draws, present
from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ...utils.module_buffers import untouched_buffers
from ..config.config import Config
from ..engine import Engine
from ..generation.rollout import asked_tokens
from ..parts import UnevenForwards
from .config import InferenceConfig

if TYPE_CHECKING:
    from ..parallel.division import LocalModel


def is_offloaded(config: Config) -> bool:
    """Parameters are in host memory or on a disk. Then units stream, and none is kept on the device."""
    return bool(config.zero_optimization.offload_param.device != "none")


@final
class InferenceEngine(nn.Module):
    """Runs `module`, of which this rank may have slices or shards. Made by `xds.init_inference`.

    Attributes that it lacks are those of the module. Ranks of one tensor group, ranks that share experts, and
    all ranks at stage 3 call `forward` together. `generate` stops at different lengths.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: InferenceConfig,
        *,
        group: Collectives | None = None,
        streams: Engine | None = None,
        cache: Mapping[str, Any] | None = None,
        local: LocalModel | None = None,
        needs_proof: bool = False,
    ) -> None:
        """
        Args:
            group: the ranks that have slices of the same layers; None: layers are whole.
            streams: the engine that gathers the module's parameters; None: they are there.
            cache: arguments that `generate` gets where the caller does not say otherwise.
            local: what other forwards of its layers are from; None: there are none.
            needs_proof: the first forward compares the slices with whole layers.
        """
        super().__init__()
        self.module = module
        self._settings = settings
        self._group = group
        self._streams = streams
        self._memory_limit = 0 if streams is not None and is_offloaded(streams.config) else None
        self._cache = dict(cache or {})
        self._local = local
        experts = None if local is None else local.experts
        self._uneven = experts or UnevenForwards()
        self._needs_proof = needs_proof
        self._times: list[float] = []
        self._profile_hooks: list[Any] = []
        self.is_compiled = False  # `compile` was called
        self._is_destroyed = False
        self.eval()

    # -- inference ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, without a graph."""
        self._check_usable()
        if self._needs_proof:
            self._needs_proof = False
            prove_slices(self.module, args, kwargs)
        with torch.no_grad():
            if self._streams is not None:
                return self._streams.forward(*args, **kwargs)
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `generate`. Ranks with slices draw the numbers of the first one of them.

        Raises:
            UsageError: more tokens than `max_out_tokens`, or the module has no `generate`.
        """
        self._check_usable()
        generate = getattr(self.module, "generate", None)
        if generate is None:
            raise UsageError(
                f"generate: {type(self.module).__name__} has no such method; call forward, or give a model of "
                "transformers with a head"
            )
        self._check_length(args, kwargs)
        wanted = {key: value for key, value in self._cache.items() if key not in kwargs}
        if kwargs.get("num_beams", 1) == 1 and kwargs.get("past_key_values") is None:
            kwargs.update(wanted)
        self._share_draws()
        with torch.no_grad():
            if self._streams is None:
                with self._uneven.running(nullcontext, streams=False):
                    return generate(*args, **kwargs)
            if "synced_gpus" in inspect.signature(generate).parameters:
                kwargs.setdefault("synced_gpus", False)  # the streaming itself keeps ranks in step
            with self._streams.generating(memory_limit=self._memory_limit, own_numbers=False):
                return generate(*args, **kwargs)

    def _check_length(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        is_decoder = not getattr(getattr(self.module, "config", None), "is_encoder_decoder", False)
        length, total = asked_tokens(self.module, args, kwargs)
        limit = self._settings.max_out_tokens
        # without the key only the prompt counts, as in DeepSpeed: nothing is allocated for the rest
        is_given = "max_out_tokens" in self._settings.model_fields_set
        if length > limit or (is_given and is_decoder and total > limit):
            raise UsageError(
                f"generate: max_out_tokens = {limit}, and the prompt has {length} tokens, with new ones "
                f"{total}; set max_out_tokens to {total} or more, or max_new_tokens lower"
            )

    def _share_draws(self) -> None:
        """From now on all ranks with slices draw the random numbers of the first one."""
        if self._group is None:
            return
        device = self._group.device
        generator = device_of(device).generator
        shared = generator.get_state().to(device)
        self._group.broadcast(shared, what="the state of random numbers")
        generator.set_state(shared.cpu())

    # -- compiled code ------------------------------------------------------------------------------------

    def compile(
        self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Compile the module's forward, or each block of it where its parameters are streamed."""
        self._check_usable()
        if self.is_compiled:
            return
        options = {"backend": backend, **(compile_kwargs or {})}
        if self._streams is not None:
            self._streams.compile(**options)
        else:
            self.module.compile(**options)
        self.is_compiled = True

    # -- times --------------------------------------------------------------------------------------------

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure each forward of the module from now on, for `model_times`.

        use_cuda_events: without effect; the device is waited for around each forward.
        """
        if not self._profile_hooks:
            starts: list[float] = []
            self._profile_hooks = [
                self.module.register_forward_pre_hook(lambda *_: starts.append(_milliseconds())),
                self.module.register_forward_hook(
                    lambda *_: self._times.append(_milliseconds() - starts.pop())
                ),
            ]

    def model_times(self) -> list[float]:
        """Milliseconds of each forward since the last call.

        Raises:
            UsageError: `profile_model_time` was not called.
        """
        if not self._profile_hooks:
            raise UsageError("model_times: nothing is measured; call profile_model_time() before")
        times, self._times = self._times, []
        return times

    # -- the rest -----------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> InferenceEngine:
        """Evaluation mode only."""
        if mode:
            need = "False: this engine only infers; xds.initialize trains"
            raise wrong("InferenceEngine.train: mode", mode, need)
        super().train(mode)
        return self

    def destroy(self) -> None:
        """Take the hooks off the module. Its layers stay slices, and weights stay in few bits."""
        if self._is_destroyed:
            return
        self._is_destroyed = True
        for hook in self._profile_hooks:
            hook.remove()
        if self._streams is not None:
            self._streams.destroy()
        if self._local is not None:
            self._local.undo()

    def _check_usable(self) -> None:
        if self._is_destroyed:
            raise UsageError("this engine was destroyed: call xds.init_inference again")

    if not TYPE_CHECKING:  # type checkers then refuse unknown names

        def __getattr__(self, name: str) -> Any:
            """Unknown names are looked up on the module."""
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("__") or "module" not in self.__dict__.get("_modules", {}):
                    raise
                return getattr(self.module, name)


def prove_slices(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run the forward once in training mode: that is when slices are compared with whole layers.

    The comparison itself is in evaluation mode, see tensor/proof.py. Buffers and random numbers are as before.

    Raises:
        UsageError: the slices compute something else.
    """
    try:
        with (
            keeping_draws(present().device),
            untouched_buffers(model.modules()),
            torch.enable_grad(),
        ):
            torch.manual_seed(0)
            model.train()
            model(*args, **kwargs)
    finally:
        model.eval()


def _milliseconds() -> float:
    present().synchronize()
    return time.perf_counter() * 1e3


__all__ = ["InferenceEngine", "prove_slices"]
