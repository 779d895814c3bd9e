"""Reads the optimizer of DeepSpeed's stage 0, which numbers whole parameters, and assigns their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ....utils.errors import UsageError
from .deepspeed_layout import order_names
from .deepspeed_shards import Held, Trained, Training, states_of

Values = Mapping[str, Tensor]


def read_whole(folder: Path, optimizer: Mapping[str, Any], values: Values) -> Training:
    """The optimizer of a checkpoint without shards.

    Args:
        values: the model's parameters by name, each once, in the dtype of forward.
    Raises UsageError: no assignment of numbers to names fits, or several do.
    """
    base = optimizer.get("optimizer_state_dict", optimizer)
    groups, states = base["param_groups"], base["state"]
    if "fp32_groups_flat" in optimizer:
        trained = _from_flats(optimizer["fp32_groups_flat"], groups, states, values)
    else:
        trained = _from_tensors(optimizer.get("fp32_groups"), groups, states, values)
    if trained is None:
        raise UsageError(
            f"{folder} cannot be imported: at stage 0 DeepSpeed numbers the optimizer's parameters, and "
            "here their shapes fit the model's names in no order or in several; save it there with stage 1, or "
            "import only its weights: --from torch with the file mp_rank_00_model_states.pt"
        )
    return Training(0, trained, groups, optimizer)


@final
class _Fits:
    """Whether a name can be a member of a group, by the shapes of its states and the values of its master."""

    def __init__(
        self,
        values: Values,
        members: Sequence[Sequence[Mapping[str, Any]]],
        masters: Sequence[Sequence[Tensor]] | None,
        *,
        by_value: bool,
    ) -> None:
        self._values = values
        self._members = members
        self._masters = masters
        self._by_value = by_value

    def __call__(self, name: str, group: int, member: int) -> bool:
        value = self._values[name]
        states = self._members[group][member].values()
        if any(isinstance(s, Tensor) and s.ndim and s.shape != value.shape for s in states):
            return False
        if self._masters is None:
            return True
        master = self._masters[group][member]
        if master.shape != value.shape:
            return False
        return not self._by_value or torch.equal(master.to(value.dtype), value)


def _from_tensors(
    masters: Sequence[Sequence[Tensor]] | None,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Any, Any],
    values: Values,
) -> list[Trained] | None:
    """Every parameter has its own states; there are masters if the model computes in 16 bits."""
    members = [[states_of(states, key, group) for key in group["params"]] for group in groups]
    counts = [len(one) for one in members]
    names = None
    for by_value in (True, False):  # values distinguish parameters of equal shape
        if names is None:
            fits = _Fits(values, members, masters, by_value=by_value)
            names = order_names(list(values), counts, fits)
    if names is None:
        return None
    trained = []
    for group, named in enumerate(names):
        for member, name in enumerate(named):
            value = values[name]
            master = value if masters is None else masters[group][member]
            held = Held(0, master.reshape(-1), _flattened(members[group][member], value))
            trained.append(Trained(name, tuple(value.shape), group, [held]))
    return trained


def _flattened(states: Mapping[str, Any], value: Tensor) -> dict[str, Any]:
    return {
        key: state.reshape(-1)
        if isinstance(state, Tensor) and state.shape == value.shape and key != "step"
        else state
        for key, state in states.items()
    }


def _from_flats(
    masters: Sequence[Tensor],
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Any, Any],
    values: Values,
) -> list[Trained] | None:
    """Each group is one flat tensor; a parameter's position is where its values are found."""
    ends = [0] * len(groups)
    trained = []
    for name, value in values.items():
        for group, master in enumerate(masters):
            start, stop = ends[group], ends[group] + value.numel()
            here = master[start:stop]
            if stop > master.numel() or not torch.equal(here.to(value.dtype), value.reshape(-1)):
                continue
            held = {
                key: state[start:stop]
                if isinstance(state, Tensor) and state.shape == master.shape
                else state
                for key, state in states_of(
                    states, groups[group]["params"][0], groups[group]
                ).items()
            }
            trained.append(Trained(name, tuple(value.shape), group, [Held(0, here, held)]))
            ends[group] = stop
            break
    is_whole = all(end == master.numel() for end, master in zip(ends, masters, strict=True))
    return trained if is_whole else None
