"""Full values, gradients and optimizer states of single parameters: `xds.zero.get_full_param` and others.

Every function is a collective: all ranks call it with the same parameter, in the same order. DeepSpeed's
names (`safe_get_full_fp32_param`, ...) are the same functions, except that the getters return None if there
is no value yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ..core.owners import ParamOwner, owner_of, reader_of
from ..layout.groups import LOW_PRECISION


def get_full_param(param: nn.Parameter) -> Tensor:
    """A new tensor with the full value: the fp32 master's if the parameter computes in 16 bits.

    Shapes:  the parameter's.
    Sends:   each rank sends its part to every other one, plus 24 bytes.

    Raises:
        UsageError: no live engine has this parameter, or the ranks pass different ones.
    """
    owner = owner_of(param, "get_full_param")
    owner.agree("get_full_param", param)
    value = owner.value(param).read(owner.group_of(param))
    assert value is not None
    return value


def set_full_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the parameter and its master, not the optimizer state. `value` is equal on all ranks.

    Shapes:  `value` the parameter's, any floating dtype.
    Sends:   24 bytes to each rank.

    Raises:
        UsageError: wrong shape, no live engine, or ranks that differ; nothing is changed.
    """
    owner = owner_of(param, "set_full_param")
    _check_shape("set_full_param", owner, param, value)
    owner.agree("set_full_param", param, value)
    owner.write(param, reader_of(value))


def get_full_grad(param: nn.Parameter) -> Tensor:
    """The gradient that step() will use, before clipping: mean over ranks, without the loss scale.

    Valid after the backward that ends the accumulation (at stages 2 and 3 after any) and before step().
    Shapes:  the parameter's, fp32 for 16-bit parameters. Sends as `get_full_param`.

    Raises:
        UsageError: there is no gradient now, it is not reduced yet, or the parameter is frozen.
    """
    grad = safe_get_full_grad(param)
    if grad is None:
        raise UsageError(
            f"get_full_grad({owner_of(param, 'get_full_grad').name_of(param)}): there is no gradient now; call "
            "it after backward and before step(), which clears it"
        )
    return grad


def set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the gradient that step() will use. `value` is equal on all ranks; errors as above."""
    owner = owner_of(param, "set_full_grad")
    _check_shape("set_full_grad", owner, param, value)
    owner.agree("set_full_grad", param, value)
    stored = owner.grad(param)
    if stored is None:
        raise UsageError(
            f"set_full_grad({owner.name_of(param)}): there is no gradient now; set it after "
            "backward and before step()"
        )
    with torch.no_grad():
        stored.write(reader_of(value / owner.gradient_factor()), owner.group_of(param).rank)


def get_full_optimizer_state(param: nn.Parameter, key: str) -> Tensor:
    """The optimizer's full state `key` ("exp_avg", "step", ...) of one parameter.

    Shapes:  the parameter's, or [] for a scalar such as the step count. Sends as `get_full_param`.

    Raises:
        UsageError: there are no states yet, there is no such state, or the parameter is frozen. States are made
            by the first forward that trains; offloaded ones, and those of torch's own classes, by a step.
    """
    state = safe_get_full_optimizer_state(param, key)
    if state is None:
        raise UsageError(
            f'get_full_optimizer_state({owner_of(param, "").name_of(param)}, "{key}"): the optimizer '
            "has no states yet; call it after the first step"
        )
    return state


def set_full_optimizer_state(param: nn.Parameter, value: Tensor, key: str) -> None:
    """Overwrite the optimizer's state `key`. `value` is equal on all ranks; errors as above."""
    owner = owner_of(param, "set_full_optimizer_state")
    _check_value("set_full_optimizer_state", owner, param, value)
    _check_key("set_full_optimizer_state", key)
    owner.agree("set_full_optimizer_state", param, value)
    stored = owner.optimizer_state(param, key)
    if stored is None:
        raise UsageError(
            f'set_full_optimizer_state({owner.name_of(param)}, "{key}"): the optimizer has no states yet; call '
            "it after the first step"
        )
    if isinstance(stored, Tensor):
        raise UsageError(
            f'set_full_optimizer_state({owner.name_of(param)}, "{key}"): this state is one number for a whole '
            "flat range, which other parameters share; it can be read but not set"
        )
    _check_shape("set_full_optimizer_state", owner, param, value)
    with torch.no_grad():
        stored.write(reader_of(value), owner.group_of(param).rank)


# -- DeepSpeed's names ------------------------------------------------------------------------------------

safe_get_full_fp32_param = get_full_param
safe_set_full_fp32_param = set_full_param
safe_set_full_grad = set_full_grad
safe_set_full_optimizer_state = set_full_optimizer_state


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """`get_full_grad`, but None if there is no gradient now."""
    owner = owner_of(param, "get_full_grad")
    owner.agree("get_full_grad", param)
    stored = owner.grad(param)
    if stored is None:
        return None
    grad = stored.read(owner.group_of(param))
    assert grad is not None
    wide = grad.float() if grad.dtype in LOW_PRECISION else grad
    return wide.mul_(owner.gradient_factor())


def safe_get_full_optimizer_state(param: nn.Parameter, key: str) -> Tensor | None:
    """`get_full_optimizer_state`, but None where there are no states yet."""
    owner = owner_of(param, "get_full_optimizer_state")
    _check_key("get_full_optimizer_state", key)
    owner.agree(f"get_full_optimizer_state {key}", param)
    stored = owner.optimizer_state(param, key)
    if stored is None or isinstance(stored, Tensor):
        return None if stored is None else stored.clone()
    return stored.read(owner.group_of(param))


def _check_key(doing: str, key: object) -> None:
    if not isinstance(key, str):
        raise wrong(f"{doing}: key", key, 'the name of a state, such as "exp_avg"')


def _check_value(doing: str, owner: ParamOwner, param: nn.Parameter, value: object) -> None:
    is_usable = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    if not is_usable or value.is_complex():  # type: ignore[attr-defined]
        raise wrong(
            f"{doing}({owner.name_of(param)}): value",
            value,
            "a dense tensor of real numbers, not on meta",
        )


def _check_shape(doing: str, owner: ParamOwner, param: nn.Parameter, value: Tensor) -> None:
    _check_value(doing, owner, param, value)
    shape: Sequence[int] = owner.value(param).full_shape
    if tuple(value.shape) != tuple(shape):
        raise UsageError(
            f"{doing}({owner.name_of(param)}): the value has shape {tuple(value.shape)}, but the parameter "
            f"has {tuple(shape)}; pass a full value of that shape"
        )
