"""`deepspeed.runtime.activation_checkpointing.offload_activations`: inputs of recomputed layers on the host.

    with get_checkpoint_hidden_states_offloading_ctx_manager():
        loss = model(**batch).loss          # a model of transformers with gradient_checkpointing_enable()
    loss.backward()

Inside, the input of each recomputed layer goes to the host, and backward brings it back. On a CPU nothing
moves.
"""

from __future__ import annotations

import importlib.util
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from ....offload.activations import Activations
from ...missing import placeholder


@final
@dataclass
class CheckpointActivationOffloadStats:
    """Counts of tensors, since the context was entered."""

    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    offloaded_tensors: int = 0
    restored_tensors: int = 0
    skipped_marked_tensors: int = 0
    kept_last_tensors: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


@final
class _Saved:
    """A marked tensor: on its device still, or what `Activations.move` returned."""

    def __init__(self, tensor: Tensor) -> None:
        self.value: Any = tensor
        self.nbytes = tensor.nbytes


@final
class CheckpointHiddenStatesOffload:
    """A context in which marked tensors that autograd saves go to the host.

    Layers of transformers (`GradientCheckpointingLayer`) mark their input themselves.

    Args:
        min_offload_bytes: smaller tensors stay; those below 64 KiB always do.
        keep_last_count: the tensors marked last that stay, because backward begins with them.
        use_streams, max_fwd_stash_count, max_cpu_buffer_pool_count: without effect: copies always overlap.
    Raises:
        ValueError: a negative number.
    """

    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64,
        keep_last_count: int = 1,
    ) -> None:
        for name, value in (
            ("keep_last_count", keep_last_count),
            ("min_offload_bytes", min_offload_bytes),
            ("max_fwd_stash_count", max_fwd_stash_count),
            ("max_cpu_buffer_pool_count", max_cpu_buffer_pool_count),
        ):
            if value < 0:
                raise ValueError(f"{name} = {value}: must not be negative")
        self.keep_last_count = keep_last_count
        self.min_offload_bytes = min_offload_bytes
        self.stats = CheckpointActivationOffloadStats()
        self._pins = use_pin_memory
        self._marks: Counter[int] = Counter()
        self._last: deque[_Saved] = deque()
        self._activations: Activations | None = None
        self._opened: ExitStack | None = None

    def mark(self, tensor: Tensor) -> None:
        """Move `tensor` when autograd saves it next."""
        self._marks[id(tensor)] += 1
        self.stats.marked_tensors += 1

    def unmark(self, tensor: Tensor) -> bool:
        """Take a mark back; whether there was one."""
        if not self._marks[id(tensor)]:
            return False
        self._marks[id(tensor)] -= 1
        return True

    def __enter__(self) -> CheckpointHiddenStatesOffload:
        """
        Raises:
            RuntimeError: it is entered already.
        """
        if self._opened is not None:
            raise RuntimeError(
                "CheckpointHiddenStatesOffload is not re-entrant: use another one inside"
            )
        self.stats = CheckpointActivationOffloadStats()
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._bring))
            _markers.enter(self)
            stack.callback(_markers.leave, self)
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        opened, self._opened = self._opened, None
        self._marks.clear()
        self._last.clear()
        if opened is not None:
            opened.close()

    def _pack(self, tensor: Tensor) -> Any:
        self.stats.saved_tensors_seen += 1
        if not self.unmark(tensor):
            return tensor
        stays = (
            tensor.device.type != "cuda"
            or tensor.nbytes < self.min_offload_bytes
            or isinstance(tensor, nn.Parameter)
            or not tensor.is_contiguous()
        )
        if stays:
            self.stats.skipped_marked_tensors += 1
            return tensor
        saved = _Saved(tensor)
        self._last.append(saved)
        while len(self._last) > self.keep_last_count:
            self._move(self._last.popleft())
        return saved

    def _move(self, saved: _Saved) -> None:
        if self._activations is None:
            self._activations = Activations(saved.value.device, pin=self._pins)
        moved = self._activations.move(saved.value)
        if moved is saved.value:
            self.stats.skipped_marked_tensors += 1
            return
        saved.value = moved
        self.stats.offloaded_tensors += 1
        self.stats.offloaded_bytes += saved.nbytes

    def _bring(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            tensor: Tensor = saved
            return tensor
        if isinstance(saved.value, Tensor) or self._activations is None:
            self.stats.kept_last_tensors += 1
            kept: Tensor = saved.value
            return kept
        self.stats.restored_tensors += 1
        self.stats.restored_bytes += saved.nbytes
        return self._activations.bring(saved.value)


@final
class _Markers:
    """Lets layers of transformers mark their input in the innermost context, while there is one."""

    def __init__(self) -> None:
        self._active: list[CheckpointHiddenStatesOffload] = []
        self._undo: Any = None

    def enter(self, manager: CheckpointHiddenStatesOffload) -> None:
        self._active.append(manager)
        if self._undo is None and importlib.util.find_spec("transformers") is not None:
            self._undo = self._patch()

    def leave(self, manager: CheckpointHiddenStatesOffload) -> None:
        self._active.remove(manager)
        if not self._active and self._undo is not None:
            self._undo()
            self._undo = None

    def _patch(self) -> Any:
        from transformers import GradientCheckpointingLayer

        kind: Any = GradientCheckpointingLayer
        is_own, original = "__call__" in vars(kind), kind.__call__

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            recomputes = layer.training and getattr(layer, "gradient_checkpointing", False)
            is_marked = bool(args) and isinstance(args[0], Tensor) and torch.is_grad_enabled()
            if not recomputes or not is_marked:
                return original(layer, *args, **kwargs)
            manager = self._active[-1]
            manager.mark(args[0])
            try:
                return original(layer, *args, **kwargs)
            finally:
                manager.unmark(args[0])  # where autograd did not save it

        def undo() -> None:
            if is_own:
                kind.__call__ = original
            else:
                del kind.__call__

        kind.__call__ = call
        return undo


_markers = _Markers()


def get_checkpoint_hidden_states_offloading_ctx_manager(
    **options: Any,
) -> CheckpointHiddenStatesOffload:
    """A `CheckpointHiddenStatesOffload` with these arguments."""
    return CheckpointHiddenStatesOffload(**options)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = [
    "CheckpointHiddenStatesOffload",
    "get_checkpoint_hidden_states_offloading_ctx_manager",
]
