"""`GatheredParameters`: full parameters inside a context, which one rank may modify."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import ACCESS_BUFFER, Collectives
from ...utils.arguments import whole, wrong
from ...utils.errors import UsageError
from ..core.owners import ParamOwner, reader_of, resolve_owner


class LostEdit(UsageError):
    """A parameter was changed where edits are not kept. Raised by all ranks, after the context has ended."""


@final
class GatheredParameters:
    """Inside the context `params` hold full values on every rank; entry and exit are collectives.

        with xds.zero.GatheredParameters(model.head.parameters(), modifier_rank=0):
            if rank == 0:
                nn.init.zeros_(model.head.weight)

    - With `modifier_rank`, all ranks get that rank's values on exit, masters included, at every stage.
    - Without it the values are for reading: at stage 3, and with shared_parameters, an edit raises on exit, and
      is lost. There engine.step() inside is refused.
    - Each parameter is gathered separately, so only the bytes of `params` are sent. Their order is free. All
      parameters of a model, without `modifier_rank`, are gathered as units; forwards inside send nothing.
    - Forward passes inside use the values that the parameters hold there. Contexts may be nested.
    - Parameters that no engine owns are left unchanged.
    - After an exception inside, nothing is written.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[Any],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """
        Args:
            params: a parameter, a module, or an iterable of parameters (or of (name, parameter)).
            modifier_rank: the rank whose edits are kept; a rank within the engine's group.
            fwd_module: DeepSpeed's name for a module that uses the parameters; not needed.
            enabled: False does nothing.
        """
        self._params = _listed(params) if enabled else []
        self._modifier = (
            None
            if modifier_rank is None
            else whole("GatheredParameters: modifier_rank", modifier_rank, 0)
        )
        self._held: list[tuple[nn.Parameter, ParamOwner]] = []
        self._overridden: list[tuple[nn.Parameter, ParamOwner]] = []
        self._holding: list[ParamOwner] = []

    def __enter__(self) -> None:
        owners = [(param, resolve_owner(param)) for param in self._params]
        # transformers passes a set, whose order is that of addresses, another one on each rank
        self._held = sorted(
            ((param, owner) for param, owner in owners if owner is not None), key=_place
        )
        if self._modifier is None:
            self._hold_units()
        for param, owner in self._held:
            self._check_modifier(owner.together(param).world_size)
            if owner in self._holding and owner.is_overridden(param):
                continue
            owner.agree("GatheredParameters", param)
            if self._modifier is not None:
                owner.begin_edit(param)
            is_usable = owner.compute(param).is_full and not owner.is_read_only(param)
            if not is_usable and not owner.is_overridden(param):
                full = owner.compute(param).read(owner.group_of(param))
                assert full is not None
                owner.override(param, full)
                self._overridden.append((param, owner))

    def _hold_units(self) -> None:
        """All parameters of a model: gather its units, without a copy, and in few messages."""
        by_owner: dict[ParamOwner, list[nn.Parameter]] = {}
        for param, owner in self._held:
            by_owner.setdefault(owner, []).append(param)
        self._holding = [owner for owner, params in by_owner.items() if owner.hold_all(params)]

    def _check_modifier(self, world_size: int) -> None:
        if self._modifier is not None and not 0 <= self._modifier < world_size:
            raise UsageError(
                f"GatheredParameters(modifier_rank={self._modifier}): must be None or a rank, 0 to "
                f"{world_size - 1}"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        edited: list[str] = []
        if kind is None:
            with torch.no_grad():
                edited = self._finish()
        overridden, self._overridden, self._held = self._overridden, [], []
        for param, owner in overridden:
            owner.clear_override(param)
        holding, self._holding = self._holding, []
        for owner in holding:
            edited += owner.release_all(checks=kind is None)
        if edited:
            raise LostEdit(
                f"{', '.join(edited[:5])} changed inside GatheredParameters without modifier_rank: the edit is "
                "lost; pass modifier_rank=0 (or another rank) to keep that rank's values"
            )

    def _finish(self) -> list[str]:
        if self._modifier is None:
            return _edited(self._overridden)
        for param, owner in self._held:
            owner.agree(f"GatheredParameters, leaving with modifier_rank={self._modifier}", param)
            whole = param.data.contiguous().view(-1)
            owner.together(param).broadcast(whole, self._modifier)
            owner.edit(param, reader_of(whole))
        return []


def _place(held: tuple[nn.Parameter, ParamOwner]) -> tuple[int, str]:
    """The place of a parameter in an order that is the same on every rank."""
    param, owner = held
    return owner.number_of(param), owner.name_of(param)


def _edited(overridden: Sequence[tuple[nn.Parameter, ParamOwner]]) -> list[str]:
    """Names of parameters that any rank changed. Each rank checks its own part; sends one byte for each."""
    by_ranks: dict[Collectives, list[tuple[nn.Parameter, ParamOwner]]] = {}
    for param, owner in overridden:  # of a tied weight more ranks know than of a block
        by_ranks.setdefault(owner.together(param), []).append((param, owner))
    names = []
    for collectives, held in by_ranks.items():
        flags = [_differs(param, owner) for param, owner in held]
        local = torch.tensor(flags, dtype=torch.uint8, device=collectives.device)
        table = collectives.gather_small(local, buffer=ACCESS_BUFFER).amax(0).tolist()
        names += [
            owner.name_of(param)
            for (param, owner), is_edited in zip(held, table, strict=True)
            if is_edited
        ]
    return names


def _differs(param: nn.Parameter, owner: ParamOwner) -> bool:
    """This rank's part of the full copy differs from its stored values in some bit."""
    stored = owner.compute(param)
    start, stop = stored.range_of(owner.group_of(param).rank)
    held = stored.own(reader_of(param.data))(start, stop)
    return not _bits(held).equal(_bits(stored.local))


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8) if values.numel() else values


def _listed(params: Any) -> list[nn.Parameter]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, Tensor):
        return [params]  # type: ignore[list-item]
    if not isinstance(params, Iterable):
        raise wrong(
            "GatheredParameters: params",
            params,
            "a parameter, a module, or an iterable of parameters",
        )
    listed = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
    unique = {id(param): param for param in listed}
    return list(unique.values())


__all__ = ["GatheredParameters", "LostEdit"]
