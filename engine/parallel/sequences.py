"""Cuts the sequences of a model over the sequence ranks of an engine.

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
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...ops.comm.mesh_groups import MeshGroups
from ...tensor.quiet_runs import evaluating
from ...tensor.same_batches import SameBatches
from ...tensor.sequence.exchange import sum_of_parts
from ...utils.errors import UsageError
from ...utils.module_buffers import untouched_buffers
from ..config.config import Config
from ..data.batches import loss_of
from ..model.forwards import Forward, replace_forwards
from .script_sequences import ScriptSequences, check_script_sequences
from .sequence_proof import SequenceProof
from .token_cuts import PlainCuts, TokenCuts, TransformersCuts, check_plain

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def check_sequences(model: nn.Module, config: Config) -> None:
    """
    Raises:
        UsageError: the sequences of this model cannot be cut.
    """
    setting = f"sequence_parallel_size = {config.sequence_parallel_size}"
    name = type(model).__name__
    if config.sequence.cut_by == "script":
        check_script_sequences(model, setting)
        return
    if not _is_causal_language_model(model):
        check_plain(model, setting)
        return
    model_config: Any = model.config
    if model_config._attn_implementation == "eager":
        raise UsageError(
            f'{setting}: {name} computes attention with attn_implementation = "eager", which cannot be '
            'replaced; build the model with "sdpa" or "flash_attention_2"'
        )
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


def _is_causal_language_model(model: nn.Module) -> bool:
    """Of transformers."""
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    loss = getattr(getattr(model, "loss_function", None), "__name__", "")
    return chosen is not None and loss == "ForCausalLMLoss"


def cut_sequences(
    model: nn.Module, config: Config, mesh: MeshGroups, *, is_stage: bool
) -> SequenceCutter | ScriptSequences:
    """Give each forward with labels the tokens of this rank.

    is_stage: `model` is a pipeline stage. The loop of the pipeline then has to prove it.
    """
    if config.sequence.cut_by == "script":
        in_eval = config.sequence.cut_in_eval
        group = mesh.along("sequence")
        return ScriptSequences(model, group, _sent_dtype(config), is_cut_in_eval=in_eval)
    return SequenceCutter(model, mesh, config, is_stage=is_stage)


def _sent_dtype(config: Config) -> torch.dtype | None:
    """In which heads are sent; None: their own."""
    sent = config.seq_parallel_communication_data_type
    return DTYPES[sent] if sent else None


def token_cuts(model: nn.Module, group: Collectives, config: Config) -> TokenCuts:
    """What cuts the inputs of `model` over the sequence ranks `group`."""
    kind = TransformersCuts if _is_causal_language_model(model) else PlainCuts
    return kind(model, group, _sent_dtype(config))


def by_name(model: nn.Module, batch: Any) -> dict[str, Any]:
    """The arguments of the forward of `model` by their names."""
    if isinstance(batch, Mapping):
        return dict(batch)
    args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return dict(inspect.signature(model.forward).bind_partial(*args).arguments)


def of_stages(cutter: SequenceCutter | ScriptSequences) -> SequenceCutter | None:
    """What the loop of a pipeline proves."""
    return cutter if isinstance(cutter, SequenceCutter) else None


@final
class SequenceCutter:
    """Hooks of the whole model: they cut its inputs, and sum the losses of the ranks."""

    def __init__(
        self, model: nn.Module, mesh: MeshGroups, config: Config, *, is_stage: bool
    ) -> None:
        self._group: Collectives = mesh.along("sequence")
        self._names = inspect.signature(model.forward)
        self._model = model
        self._tokens = token_cuts(model, self._group, config)
        self._is_cut = False  # the forward that runs
        self._check = SameBatches(
            model, self._group, "sequence_parallel_size", "sequence", draws_equal=False
        )
        self.proof = SequenceProof(model, self._group, mesh.opened[0], _sent_dtype(config))
        self._cuts = True
        self._short: dict[str, Any] | None = None  # inputs of the proof, until they are compared
        self._is_stage = is_stage
        proven = [] if is_stage else [model]
        self._restore = replace_forwards(proven, self._proving)
        self._hooks = [
            model.register_forward_pre_hook(self._cut, with_kwargs=True),
            model.register_forward_hook(self._sum),
        ]

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
        return self.proof.short(by_name(self._model, batch), self._tokens.labels)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(self._names.bind_partial(*args).arguments) | kwargs

    def _cut(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._is_cut = False
        inputs = self._by_name(args, kwargs)
        if not self._cuts:
            self._tokens.stay_whole()
            return args, kwargs
        if inputs.get(self._tokens.labels) is None:
            if torch.is_grad_enabled() and model.training:
                raise UsageError(
                    f"sequence_parallel_size = {self._group.world_size}: the batch has no labels, and the loss "
                    f"of all ranks is computed in the model; pass {self._tokens.labels}="
                )
            self._tokens.stay_whole()
            return args, kwargs  # each rank computes all tokens
        self._short = None if self._is_stage else self.short(inputs)
        self._is_cut = True
        if self._short is not None:
            return (), inputs  # cut after the proof
        return (), self._tokens.cut(inputs)

    def _proving(self, forward: Forward) -> Forward:
        """The model's forward; before the first one, a few tokens are computed whole and cut."""

        @functools.wraps(forward)
        def proven(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._short is None:
                return forward(model, *args, **kwargs)
            short, self._short = self._short, None
            with evaluating(model), untouched_buffers(model.modules()), torch.no_grad():
                self._prove(functools.partial(forward, model), short)
            return forward(model, **self._tokens.cut(kwargs))

        return proven

    def _prove(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> None:
        self._tokens.stay_whole()
        wanted = loss_of(forward(**inputs))
        part = self._tokens.part(loss_of(forward(**self._tokens.cut(inputs))))
        self.proof.compare(sum_of_parts(part, self._group), wanted)

    def _sum(self, model: nn.Module, args: Any, output: Any) -> Any:
        if not self._is_cut:
            return output
        self._is_cut = False
        loss = sum_of_parts(self._tokens.part(loss_of(output)), self._group)
        if isinstance(output, Tensor):
            return loss
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output.loss = loss
        return output

    def undo(self) -> None:
        """Take the hooks off, and give the model its attention back."""
        self._check.remove()
        self._restore()
        for hook in self._hooks:
            hook.remove()
        self._tokens.undo()


Cutter = SequenceCutter | ScriptSequences

__all__ = ["SequenceCutter", "check_sequences", "cut_sequences", "of_stages"]
