"""Loads weights from a state dict, a safetensors file, or a folder of files, range by range.

- A rank reads only the rows of a file that overlap its part of a parameter.
- Nothing in a file is executed: `.bin` and `.pt` files are read with weights_only, mapped into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.comm.exchange import all_gather_json
from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.views import holds, may_overlap, write
from ..access.stages import all_names, groups_of, spans_stages
from ..core.owners import find_owner
from ..core.param_bucket import placeholder_like
from ..layout.groups import FlatGroups
from ..layout.slices import Reader, Slices, reader_of_slice
from .construction import make_real
from .slices import SliceStore
from .sources import WeightSource, open_weights

log = logging.getLogger("xds")
_WHOLE: Mapping[int, Slices] = MappingProxyType({})
_NOT_STRICT = "strict=False ignores missing and extra names"


# -- loading into a model ---------------------------------------------------------------------------------


@dataclass
class Match:
    """What fits between a model and weights, and what does not.

    found: name in the model -> name in the weights, for every parameter and buffer that they have.
    """

    found: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)

    @property
    def num_problems(self) -> int:
        return len(self.missing) + len(self.extra) + len(self.shapes)

    def check(self, source: str, *, strict: bool, remedy: str) -> None:
        """Raise UsageError where names are missing or extra (with `strict`), or shapes differ."""
        problems = [f"shapes differ: {_some(self.shapes)}"] if self.shapes else []
        if strict and self.missing:
            problems.append(f"missing in the weights: {_some(self.missing)}")
        if strict and self.extra:
            problems.append(f"not in the model: {_some(self.extra)}")
        if problems:
            raise UsageError(
                f"{source} does not fit the model, nothing was changed; {'; '.join(problems)}; {remedy}"
            )


def match_names(
    model: nn.Module,
    weights: WeightSource,
    whole: Sequence[Sequence[str]] | None = None,
    slices: Mapping[int, Slices] = _WHOLE,
) -> Match:
    """Compare the names and shapes of a model with those of weights.

    For a tied parameter one of its names is enough. Non-persistent buffers are not required.

    Args:
        whole: the names of each tensor of the whole model, of which `model` is a part.
        slices: id(parameter) -> its slices, where tensor ranks have cut it.
    """
    saved = set(weights.names())
    model_names = _names_by_tensor(model)
    others = {name: names for names in whole or () for name in names}
    match = Match()
    for local, tensor in model_names:
        names = [*local, *(name for name in others.get(local[0], ()) if name not in local)]
        stored = next((name for name in names if name in saved), None)
        if stored is None:
            match.missing.append(names[0])
            continue
        param_slices = slices.get(id(tensor))
        shape = tuple(tensor.shape) if param_slices is None else param_slices.whole_shape
        if weights.shape(stored) != shape:
            match.shapes.append(f"{stored} is {weights.shape(stored)}, in the model {shape}")
        else:
            match.found[names[0]] = stored
    match.extra = sorted(
        saved - {name for names, _ in model_names for name in names} - others.keys()
    )
    return match


def _as_converted(
    model: nn.Module,
    weights: WeightSource,
    match: Match,
    whole: Sequence[Sequence[str]] | None,
    slices: Mapping[int, Slices],
) -> tuple[WeightSource, Match]:
    """Weights through the conversions of the model's library, where more of them fits then."""
    from .conversions import converted

    others = converted(weights, model)
    if others is None:
        return weights, match
    matched = match_names(model, others, whole, slices)
    return (others, matched) if matched.num_problems < match.num_problems else (weights, match)


def _names_by_tensor(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    names: dict[int, tuple[list[str], Tensor]] = {}
    kept = set(model.state_dict(keep_vars=True))
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if name in kept:
            names.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(names.values())


def _some(items: Sequence[str]) -> str:
    shown = ", ".join(map(printable, items[:5]))
    return shown if len(items) <= 5 else f"{shown} and {len(items) - 5} more"


def load_weights(
    model: nn.Module,
    source: Any,
    *,
    strict: bool = True,
    store: SliceStore | None = None,
    remedy: str = _NOT_STRICT,
    groups: FlatGroups | None = None,
    optional: Collection[str] = (),
) -> None:
    """Overwrite parameters and buffers of `model`, full or sharded, by those of `source`. For all ranks.

    Each rank reads its own part. Nothing is sent, except names that do not fit. Master weights are overwritten,
    optimizer states are kept.

    Args:
        model: built in `xds.zero.Init`, or an engine's module, or an ordinary one.
        source: a state dict, a .safetensors file or index, a folder with one, or a .bin/.pt file.
        strict: missing and extra names are an error.
        store: keeps parameters on the meta device in slices; None makes them full.
        remedy: how the caller ignores missing and extra names, for the message.
        groups: of the engine of `model`, if that is known; `source` has the weights of all its stages.
        optional: last parts of names that keep their values where `source` does not have them.

    Raises:
        UsageError: names or shapes do not fit, or there is nothing to read; nothing is changed.
    """
    if not isinstance(model, nn.Module):
        raise wrong("load_weights: model", model, "the model, a torch.nn.Module object")
    groups = groups or groups_of(model)
    stages = groups if spans_stages(groups) else None
    slices = _WHOLE if groups is None else groups.slices
    whole = all_names(stages, _names_by_tensor(model)) if stages is not None else None
    with torch.no_grad():
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        match, failure = Match(), None
        try:
            weights = open_weights(source)
            all_of = None if whole is None else list(whole.values())
            match = match_names(model, weights, all_of, slices)
            if match.num_problems:
                weights, match = _as_converted(model, weights, match, all_of, slices)
            for name, stored in match.found.items():
                _check_view(name, tensors[name], weights.reader(stored))
        except UsageError as error:
            if groups is None:
                raise
            failure = error
        if groups is not None:
            _agree(groups, match, failure)
        match.missing = [n for n in match.missing if n.rpartition(".")[2] not in optional]
        match.check(weights.source, strict=strict, remedy=weights.remedy or remedy)
        for name, stored in match.found.items():
            tensor, reader = tensors[name], weights.reader(stored)
            if id(tensor) in slices and find_owner(tensor) is None:
                reader = reader_of_slice(reader, slices[id(tensor)].box)
            _overwrite(tensor, reader, store)


def _agree(groups: FlatGroups, match: Match, failure: UsageError | None) -> None:
    """Add what does not fit on other ranks to `match`. A collective of all ranks.

    Raises:
        UsageError: on every rank: one could not read the weights.
    """
    answer = [str(failure or ""), match.missing, match.shapes]
    answers = all_gather_json(groups.world, answer, "whether weights fit")
    failed = [rank for rank, (text, *_) in enumerate(answers) if text]
    if failed:
        raise failure or UsageError(f"rank {failed[0]}: {answers[failed[0]][0]}")
    match.missing = list(dict.fromkeys(name for _, missing, _ in answers for name in missing))
    match.shapes = list(dict.fromkeys(text for *_, shapes in answers for text in shapes))


def _check_view(name: str, tensor: Tensor, reader: Reader) -> None:
    """Raise if elements of `tensor` that share memory would get different values."""
    if tensor.is_meta or not may_overlap(tensor):
        return
    owner = find_owner(tensor)
    if owner is not None and owner.compute(tensor).local.data_ptr() != tensor.data_ptr():  # type: ignore[arg-type]
        return  # the tensor is a placeholder: its values are stored elsewhere
    values = reader(0, tensor.numel()).to(tensor).view(tensor.shape)
    if not holds(tensor.data, values):
        raise UsageError(
            f"{name} is a view whose elements share memory (expanded), and the weights have different values "
            "for them; nothing was changed; give the module a separate tensor: tensor.clone()"
        )


def _overwrite(tensor: Tensor, reader: Reader, store: SliceStore | None) -> None:
    if tensor.is_meta and store is not None and isinstance(tensor, nn.Parameter):
        make_real(tensor, placeholder_like(tensor.shape, tensor.dtype, store.collectives.device))
        return store.shard_from(tensor, reader)
    if tensor.is_meta:
        make_real(tensor, torch.empty_like(tensor, device="cpu"))
    owner = find_owner(tensor)
    if owner is not None:
        owner.write(tensor, reader)  # type: ignore[arg-type]
    else:
        write(tensor.data, reader(0, tensor.numel()).view(tensor.shape))


__all__ = ["Match", "load_weights", "match_names"]
