"""The states of an engine as a whole: in and out of state dicts and checkpoints, away from the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from ..utils.arguments import wrong
from ..utils.errors import UsageError, XdsError
from ..utils.quoting import printable
from .counters import Counters
from .parts import Parts

if TYPE_CHECKING:
    from ..zero.features.host_copies import HostCopies
    from .checkpoint.load_plan import LoadOptions
    from .checkpoint.save import SaveOptions

PARKED = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


@final
class States:
    """Moves the states of one engine. Every method is for all ranks together."""

    def __init__(self, parts: Parts, counters: Counters) -> None:
        self.are_released = False  # the engine was destroyed
        self.client_state: Mapping[str, Any] | None = None  # of the last save or load of the script
        self._parts = parts
        self._counters = counters
        self._host_copies: HostCopies | None = None

    def check_usable(self) -> None:
        """Raises UsageError: the states are away from the device, or the engine was destroyed."""
        if self.are_released:
            raise UsageError("this engine was destroyed: make a new one with xds.initialize")
        if self.are_offloaded:
            raise UsageError("the engine's states are offloaded: call reload_states() first")

    @property
    def are_offloaded(self) -> bool:
        """`offload` was called, and `reload` was not called since."""
        return self._host_copies is not None

    def is_on_host(self, tensor: Tensor) -> bool:
        """`offload` has moved the values of `tensor`, which keeps its device and has no memory."""
        return self._host_copies is not None and self._host_copies.holds(tensor)

    def full_state_dict(self, *, rank0_only: bool, full_precision: bool) -> dict[str, Any]:
        """The whole model's state dict, on the CPU, gathered parameter by parameter."""
        from ..zero.access.whole import full_state_dict

        target = 0 if rank0_only else None
        return full_state_dict(
            self._parts.module,
            self._parts.sharded.flat_groups,
            target=target,
            full_precision=full_precision,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool) -> None:
        """Overwrite parameters, masters and buffers by whole values."""
        from ..zero.construction.weights import load_weights

        groups = self._parts.sharded.flat_groups
        load_weights(self._parts.module, state_dict, strict=strict, groups=groups)

    def save(
        self,
        save_dir: str | Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        options: SaveOptions,
    ) -> float | None:
        """Write a checkpoint; its metric."""
        from .checkpoint.save import save_checkpoint
        from .checkpoint.saver import build_saver

        parts = self._parts
        if parts.saver is None:
            parts.saver = build_saver(parts.config, parts.sharded.collectives)
        try:
            metric = parts.outer.save(
                save_dir,
                lambda folder: save_checkpoint(
                    parts, self._counters, folder, tag, client_state, options
                ),
            )
            if client_state is not None:
                self.client_state = dict(client_state)
            return metric
        except UsageError:
            raise
        except XdsError as error:
            where = printable(Path(save_dir).absolute())
            raise type(error)(
                f"{error} (in {where}; older checkpoints there are unchanged)"
            ) from error

    def load(
        self, load_dir: str | Path, tag: str | None, options: LoadOptions
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint; its folder and client_state, or (None, None)."""
        from .checkpoint.load import load_checkpoint

        if self._parts.saver is not None:
            self._parts.saver.wait()
        parts, counters = self._parts, self._counters
        path, client_state = parts.outer.load(
            load_dir,
            tag,
            lambda folder, tag: load_checkpoint(parts, counters, folder, tag, options),
            falls_back=options.fallback,
        )
        if client_state and not options.load_module_only:
            self.client_state = client_state
        return path, client_state

    def memory_plan(self) -> dict[str, int]:
        """Bytes of model states on this rank."""
        from ..zero.model.state_memory import memory_plan

        plan = memory_plan(self._parts.sharded, self._parts.updater)
        return plan | self._parts.outer.held_bytes

    def offload(self, include: Iterable[Any] | None, device: Any, *, pin_memory: bool) -> None:
        """Move the included states to host memory."""
        from ..zero.features.host_copies import HostCopies
        from ..zero.model.state_memory import StateMemory

        names = _names(include)
        if str(getattr(device, "value", device)).split(":")[0] != "cpu":
            raise UsageError(f'offload_states(device="{device}"): states can go to "cpu" only')
        sharded, states = self._parts.sharded, StateMemory(self._parts.updater)
        if sharded.has_gradients:
            raise UsageError(
                "offload_states() while gradients wait for a step: call it after step(), or after zero_grad()"
            )
        self._host_copies = HostCopies(pin_memory=pin_memory)
        sharded.before_update()
        tensors = [
            *(states.state_tensors() if "optim_states" in names else ()),
            *(states.master_tensors() if "hp_params" in names else ()),
            *(sharded.memory.param_tensors() if "lp_params" in names else ()),
        ]
        if {"lp_grads", "contiguous_grad_buffer"} & names:
            sharded.memory.release_gradients()
        if self._parts.device.type != "cpu":
            sharded.memory.hide_whole_params("lp_params" in names)
            self._host_copies.move_to_host(t for t in tensors if t.device.type != "cpu")

    def reload(self) -> None:
        """Bring back what `offload` moved. Without one before it nothing happens."""
        host_copies, self._host_copies = self._host_copies, None
        if host_copies is not None:
            host_copies.move_back()
            self._parts.sharded.memory.show_whole_params()


def _names(include: Iterable[Any] | None) -> set[str]:
    if include is not None and (isinstance(include, str) or not isinstance(include, Iterable)):
        raise wrong("offload_states: include", include, f"a list of {', '.join(PARKED)}, or None")
    names = {str(getattr(name, "value", name)) for name in (PARKED if include is None else include)}
    unknown = sorted(names - set(PARKED))
    if unknown:
        raise UsageError(
            f"offload_states(include={unknown}): there is no such state; choose from {', '.join(PARKED)}"
        )
    return names


__all__ = ["PARKED", "States"]
