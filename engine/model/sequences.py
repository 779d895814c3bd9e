"""Cuts the sequences of a model of transformers over the sequence ranks of an engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from ...ops.comm.collectives import Collectives
from ...ops.comm.mesh_groups import MeshGroups
from ...tensor.same_batches import SameBatches
from ...tensor.sequence.attention import ARGUMENT, PREFIX, SequenceAttention, register
from ...tensor.sequence.batches import cut_batch, short_batch
from ...tensor.sequence.exchange import sum_of_parts
from ...utils.errors import UsageError
from ..config.config import Config
from ..data.batches import loss_of
from .forwards import Forward, replace_forwards

NEAR, NEAR_16_BITS = 1e-4, 2e-2  # relative difference of losses; a wrong mask gives 1e-2 and more
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def check_sequences(model: nn.Module, config: Config) -> None:
    """
    Raises:
        UsageError: the sequences of this model cannot be cut.
    """
    if config.sequence_parallel_size == 1:
        return
    setting = f"sequence_parallel_size = {config.sequence_parallel_size}"
    name = type(model).__name__
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    loss = getattr(getattr(model, "loss_function", None), "__name__", "")
    if chosen is None or loss != "ForCausalLMLoss":
        raise UsageError(
            f"{setting}: {name} is not a causal language model of transformers, so its sequences cannot be "
            "cut; set it to 1"
        )
    if chosen == "eager":
        raise UsageError(
            f'{setting}: {name} computes attention with attn_implementation = "eager", which cannot be '
            'replaced; build the model with "sdpa" or "flash_attention_2"'
        )
    model_config: Any = model.config
    if getattr(model_config, "output_router_logits", False):
        raise UsageError(
            f"{setting}: the balancing loss of {name} is not a sum over tokens; set output_router_logits to "
            "false in its config"
        )
    if getattr(model_config, "attention_chunk_size", None):
        raise UsageError(
            f"{setting}: {name} attends in chunks (attention_chunk_size), whose masks are not supported; set "
            "sequence_parallel_size to 1"
        )


def cut_sequences(model: nn.Module, config: Config, mesh: MeshGroups) -> Callable[[], None]:
    """Give each forward with labels the tokens of this rank. The result undoes it."""
    if config.sequence_parallel_size == 1:
        return lambda: None
    return _Cutter(model, mesh.along("sequence"), config).undo


@final
class _Cutter:
    """Hooks of the whole model: they cut its inputs, and sum the losses of the ranks."""

    def __init__(self, model: nn.Module, group: Collectives, config: Config) -> None:
        sent = config.seq_parallel_communication_data_type
        self._dtype = DTYPES[sent] if sent else None
        self._group = group
        self._names = inspect.signature(model.forward)
        self._current: SequenceAttention | None = None
        self._check = SameBatches(
            model, group, "sequence_parallel_size", "sequence", draws_equal=False
        )
        self._proof: dict[str, Any] | None = None  # whole inputs, until the first ones are compared
        self._is_proven = False
        self._restore = replace_forwards([model], self._proving)
        self._hooks = [
            model.register_forward_pre_hook(self._cut, with_kwargs=True),
            model.register_forward_hook(self._sum),
        ]
        self._configs: list[tuple[Any, str]] = []
        for module in model.modules():
            self._choose(getattr(module, "config", None))

    def _choose(self, config: Any) -> None:
        chosen = getattr(config, "_attn_implementation", None)
        if isinstance(chosen, str) and chosen != "eager" and not chosen.startswith(PREFIX):
            self._configs.append((config, chosen))
            config._attn_implementation = register(chosen)

    def _cut(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = dict(self._names.bind_partial(*args).arguments)
        inputs = bound | kwargs
        self._current = None
        if inputs.get("labels") is None:
            if torch.is_grad_enabled() and model.training:
                raise UsageError(
                    f"sequence_parallel_size = {self._group.world_size}: the batch has no labels, and the loss "
                    "of all ranks is computed in the model; pass labels="
                )
            return args, kwargs  # each rank computes all tokens
        self._proof = None if self._is_proven else short_batch(inputs, self._group.world_size)
        found, whole = cut_batch(inputs, self._group.rank, self._group.world_size)
        self._current = SequenceAttention(self._group, whole, self._dtype)
        return (), found | {ARGUMENT: self._current}

    def _proving(self, forward: Forward) -> Forward:
        """The model's forward; before the first one, a few tokens are computed whole and cut."""

        @functools.wraps(forward)
        def proven(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._proof is not None:
                inputs, self._proof = self._proof, None
                with _without_dropout(model), torch.no_grad():
                    self._prove(model, functools.partial(forward, model), inputs)
                self._is_proven = True
            return forward(model, *args, **kwargs)

        return proven

    def _prove(self, model: nn.Module, forward: Callable[..., Any], inputs: dict[str, Any]) -> None:
        cut, whole = cut_batch(inputs, self._group.rank, self._group.world_size)
        attention = SequenceAttention(self._group, whole, self._dtype)
        wanted = loss_of(forward(**inputs))
        found = sum_of_parts(loss_of(forward(**cut, **{ARGUMENT: attention})), self._group)
        has_16_bits = self._dtype is not None or _computes_in_16_bits(model)
        near = NEAR_16_BITS if has_16_bits else NEAR
        if not torch.isclose(found.float(), wanted.float(), rtol=near, atol=near):
            raise UsageError(
                f"sequence_parallel_size = {self._group.world_size}: {type(model).__name__} gives the loss "
                f"{found.item():.6f} with its tokens on several ranks, and {wanted.item():.6f} on one: its "
                "attention has a mask of its own, or modules that need all tokens; set it to 1"
            )

    def _sum(self, model: nn.Module, args: Any, output: Any) -> Any:
        if self._current is None:
            return output
        current, self._current = self._current, None
        if current.whole.num_calls == 0:
            raise UsageError(
                f"sequence_parallel_size = {self._group.world_size}: {type(model).__name__} does not hand its "
                "arguments down to attention, so heads cannot be exchanged; set it to 1"
            )
        if isinstance(output, tuple):
            return (sum_of_parts(output[0], self._group), *output[1:])
        output.loss = sum_of_parts(output.loss, self._group)
        return output

    def undo(self) -> None:
        """Take the hooks off, and give the model its attention back."""
        self._check.remove()
        self._restore()
        for hook in self._hooks:
            hook.remove()
        for config, chosen in self._configs:
            config._attn_implementation = chosen


def _computes_in_16_bits(model: nn.Module) -> bool:
    is_autocast = torch.is_autocast_enabled(next(model.parameters()).device.type)
    return is_autocast or any(
        param.is_floating_point() and param.dtype.itemsize == 2 for param in model.parameters()
    )


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


__all__ = ["check_sequences", "cut_sequences"]
