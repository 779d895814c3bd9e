"""The states of an engine as a whole: in and out of state dicts and checkpoints, away from the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..utils.errors import UsageError
from ..zero.access.whole import full_state_dict
from ..zero.construction.weights import load_weights
from ..zero.core.host_copies import HostCopies
from .checkpoint.load import load_checkpoint
from .checkpoint.load_plan import LoadOptions
from .checkpoint.save import SaveOptions, save_checkpoint
from .checkpoint.saver import Progress
from .telemetry.counts import Counts

PARKED = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


class States(Counts, ABC):
    """The part of an engine that moves its states. Everything here is for all ranks together."""

    _host_copies: HostCopies | None = None

    @abstractmethod
    def _check_alive(self) -> None:
        """Raise unless the engine can be used now."""

    # -- the model --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole model's state dict on every rank, on the CPU, in the dtypes that forward uses."""
        return self.full_state_dict(rank0_only=False)

    def full_state_dict(
        self, *, rank0_only: bool = True, full_precision: bool = False
    ) -> dict[str, Any]:
        """The whole model's state dict, on the CPU, gathered parameter by parameter.

        Args:
            rank0_only: the other ranks get {}, and need no memory for it.
            full_precision: fp32 masters instead of 16-bit values.
        """
        self._check_alive()
        target = 0 if rank0_only else None
        return full_state_dict(self._parts.module, target=target, full_precision=full_precision)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Overwrite parameters, masters and buffers by whole values, the same on every rank.

        Raises UsageError, and nothing has changed, where names or shapes do not fit.
        """
        self._check_alive()
        load_weights(self._parts.module, state_dict, strict=strict)

    # -- checkpoints ------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write all that training needs to go on to save_dir/tag (default `global_step{N}`). A collective.

        At every instant the last committed checkpoint is whole; a failure on one rank raises on all.
        With checkpoint.async_save it returns once the states are copied to host memory; the commit comes
        later, and what goes wrong is raised by the next step(), wait_for_checkpoint() or destroy().
        client_state: JSON values and tensors, nested; rank 0's is kept.
        exclude_frozen_parameters: leave the values of frozen parameters out of the files; a load then leaves
            the model's own as they are.
        """
        self._check_alive()
        save_checkpoint(
            self._parts.training,
            self,
            save_dir,
            tag,
            client_state,
            SaveOptions(save_latest, exclude_frozen_parameters),
        )
        return True

    def wait_for_checkpoint(self) -> None:
        """Return when no checkpoint is being written in the background (checkpoint.async_save).

        Raises XdsError: it could not be written; the one before it is the last.
        """
        self._parts.saver.wait()

    def checkpoint_progress(self) -> Progress | None:
        """What this rank is writing in the background; None: nothing."""
        return self._parts.saver.progress()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        fallback: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint of any stage and number of ranks (default: `latest`). A collective.

        Returns its folder and client_state; (None, None) with a warning where there is no `latest`.
        fallback: where a file of it is damaged or missing, warn and take the one of the next fewer steps; where
            there is no `latest`, that of the most.
        Raises UsageError, and nothing has changed, where it is damaged or does not fit.
        """
        self._check_alive()
        self.wait_for_checkpoint()
        options = LoadOptions(
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            fallback,
        )
        found = load_checkpoint(self._parts.training, self, load_dir, tag, options)
        if found[0] is not None and not load_module_only:
            self._forget_batches()
        return found

    @abstractmethod
    def _forget_batches(self) -> None:
        """The next batches come from where the loader is now."""

    # -- memory -----------------------------------------------------------------------------------------

    def memory_plan(self) -> dict[str, int]:
        """Bytes of model states on this rank: param, grad, master, optimizer, and the named buckets."""
        return {**self._parts.sharded.memory.state_bytes(), **self._parts.updater.state_bytes()}

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory until `reload_states`, to lend the device to something else.

        Args:
            include: any of optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer (or enum
                members of these values); None is all of them. Gradients are not moved but let go of.
            device: only the host's memory is there.
            pin_memory: page-locked host memory. `non_blocking` is accepted; the copies are waited for.
        On a CPU the states are in host memory already: nothing moves, but the engine refuses to run until
        `reload_states` all the same.
        Raises:
            UsageError: gradients wait for a step, states are away already, or an unknown name or device.
        """
        self._check_alive()
        names = _names(include)
        if str(getattr(device, "value", device)).split(":")[0] != "cpu":
            raise UsageError(f'offload_states(device="{device}"): states can go to "cpu" only')
        sharded, updater = self._parts.sharded, self._parts.updater
        if sharded.has_gradients:
            raise UsageError(
                "offload_states() while gradients wait for a step: call it after step(), or after zero_grad()"
            )
        self._host_copies = HostCopies(pin_memory=pin_memory)
        sharded.before_update()
        tensors = [
            *(updater.state_tensors() if "optim_states" in names else ()),
            *(updater.master_tensors() if "hp_params" in names else ()),
            *(sharded.memory.param_tensors() if "lp_params" in names else ()),
        ]
        if {"lp_grads", "contiguous_grad_buffer"} & names:
            sharded.memory.release_gradients()
        if self._parts.device.type != "cpu":
            sharded.memory.hide_whole_params("lp_params" in names)
            self._host_copies.move_to_host(tensors)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved. Without one before it nothing happens."""
        host_copies, self._host_copies = self._host_copies, None
        if host_copies is not None:
            host_copies.move_back()
            self._parts.sharded.memory.show_whole_params()


def _names(include: Iterable[Any] | None) -> set[str]:
    names = {str(getattr(name, "value", name)) for name in (PARKED if include is None else include)}
    unknown = sorted(names - set(PARKED))
    if unknown:
        raise UsageError(
            f"offload_states(include={unknown}): there is no such state; choose from {', '.join(PARKED)}"
        )
    return names


__all__ = ["PARKED", "States"]
