"""Cuts the sequences of a model of transformers over the sequence ranks of an engine.

forward of the whole model   _cut    inputs ──> those of own tokens, and the whole masks for attention
                             _sum    loss of own tokens ──> sum over the ranks
first one                    proven on a few tokens: here, or by a pipeline's loop before its first step
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from ...ops.comm.collectives import Collectives
from ...ops.comm.mesh_groups import MeshGroups
from ...tensor.same_batches import SameBatches
from ...tensor.sequence.attention import ARGUMENT, PREFIX, SequenceAttention, register
from ...tensor.sequence.batches import cut_batch
from ...tensor.sequence.exchange import sum_of_parts
from ...utils.errors import UsageError
from ..config.config import Config
from ..data.batches import loss_of
from .forwards import Forward, replace_forwards
from .sequence_proof import SequenceProof

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


def cut_sequences(
    model: nn.Module, config: Config, mesh: MeshGroups, *, is_stage: bool
) -> SequenceCutter | None:
    """Give each forward with labels the tokens of this rank; None: there are no sequence ranks.

    is_stage: `model` is a pipeline stage. The loop of the pipeline then has to prove it.
    """
    if config.sequence_parallel_size == 1:
        return None
    return SequenceCutter(model, mesh, config, is_stage=is_stage)


@final
class SequenceCutter:
    """Hooks of the whole model: they cut its inputs, and sum the losses of the ranks."""

    def __init__(
        self, model: nn.Module, mesh: MeshGroups, config: Config, *, is_stage: bool
    ) -> None:
        sent = config.seq_parallel_communication_data_type
        self._dtype = DTYPES[sent] if sent else None
        self._group: Collectives = mesh.along("sequence")
        self._names = inspect.signature(model.forward)
        self._current: SequenceAttention | None = None
        self._check = SameBatches(
            model, self._group, "sequence_parallel_size", "sequence", draws_equal=False
        )
        self.proof = SequenceProof(model, self._group, mesh.opened[0], self._dtype)
        self._cuts = True
        self._short: dict[str, Any] | None = None  # inputs of the proof, until they are compared
        self._is_stage = is_stage
        proven = [] if is_stage else [model]
        self._restore = replace_forwards(proven, self._proving)
        self._hooks = [
            model.register_forward_pre_hook(self._cut, with_kwargs=True),
            model.register_forward_hook(self._sum),
        ]
        self._configs: list[tuple[Any, str]] = []
        for module in model.modules():
            self._choose(getattr(module, "config", None))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Forwards in this context compute all tokens on each rank."""
        self._cuts = False
        try:
            yield
        finally:
            self._cuts = True

    def short(self, batch: Any) -> dict[str, Any] | None:
        """A few tokens of a batch for the proof; None: nothing is to be proven. For all ranks."""
        if self.proof.is_done:
            return None
        args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        is_named = isinstance(batch, Mapping)
        return self.proof.short(dict(batch) if is_named else self._by_name(args, {}))

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(self._names.bind_partial(*args).arguments) | kwargs

    def _choose(self, config: Any) -> None:
        chosen = getattr(config, "_attn_implementation", None)
        if isinstance(chosen, str) and chosen != "eager" and not chosen.startswith(PREFIX):
            self._configs.append((config, chosen))
            config._attn_implementation = register(chosen)

    def _cut(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._current = None
        inputs = self._by_name(args, kwargs)
        if not self._cuts:
            return args, kwargs
        if inputs.get("labels") is None:
            if torch.is_grad_enabled() and model.training:
                raise UsageError(
                    f"sequence_parallel_size = {self._group.world_size}: the batch has no labels, and the loss "
                    "of all ranks is computed in the model; pass labels="
                )
            return args, kwargs  # each rank computes all tokens
        self._short = None if self._is_stage else self.short(inputs)
        found, whole = cut_batch(inputs, self._group.rank, self._group.world_size)
        self._current = SequenceAttention(self._group, whole, self._dtype)
        return (), found | {ARGUMENT: self._current}

    def _proving(self, forward: Forward) -> Forward:
        """The model's forward; before the first one, a few tokens are computed whole and cut."""

        @functools.wraps(forward)
        def proven(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._short is not None:
                inputs, self._short = self._short, None
                with _without_dropout(model), torch.no_grad():
                    self._prove(functools.partial(forward, model), inputs)
            return forward(model, *args, **kwargs)

        return proven

    def _prove(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> None:
        cut, whole = cut_batch(inputs, self._group.rank, self._group.world_size)
        attention = SequenceAttention(self._group, whole, self._dtype)
        wanted = loss_of(forward(**inputs))
        found = sum_of_parts(loss_of(forward(**cut, **{ARGUMENT: attention})), self._group)
        self.proof.compare(found, wanted)

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


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


__all__ = ["SequenceCutter", "check_sequences", "cut_sequences"]
