"""Checks in every forward that user code has not changed dtypes or unfrozen parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from torch import nn

from ...ops.torch_internals import NoTorchFunction
from ...utils.errors import UsageError
from ..core.backward_pass import BackwardPass
from ..core.param_bucket import ParamBucket


@final
class DtypeGuard:
    """What has to stay as it was at `initialize`."""

    def __init__(
        self,
        model: nn.Module,
        flats: Sequence[ParamBucket],
        trained: Collection[int],
        backward_pass: BackwardPass,
    ) -> None:
        """trained: ids of the parameters that the optimizer updates."""
        self._flats = flats
        self._dtypes = [(param, flat.dtype) for flat in flats for param in flat.params]
        self._backward_pass = backward_pass
        self._frozen = [
            (name, param, param.dtype)
            for name, param in model.named_parameters()
            if id(param) not in trained and not param.requires_grad
        ]

    def check(self) -> None:
        """Check dtypes, which are restored where they differ, and frozen parameters.

        Raises:
            UsageError: a dtype was changed, or a parameter that no optimizer updates was unfrozen.
        """
        with NoTorchFunction():
            is_changed = any([param.dtype is not dtype for param, dtype in self._dtypes])
        if is_changed:
            changed = [(flat, position) for flat in self._flats for position in flat.other_dtypes()]
            self._backward_pass.hook_gradients()
            for _, param, dtype in self._frozen:
                param.data = param.data.to(dtype)
            flat, position = changed[0]
            raise UsageError(
                f"{flat.layout.slots[position].name} and {len(changed) - 1} more parameters changed their "
                f"dtype after xds.initialize (module.float(), .half(), .to(dtype)): the engine computes in "
                f"{flat.dtype}, and they are {flat.dtype} again; choose the precision by fp16, bf16 or "
                "torch_autocast in the config"
            )
        for name, param, _ in self._frozen:
            if param.requires_grad:
                raise UsageError(
                    f"{name}.requires_grad_(True) after xds.initialize: it was frozen there, so the engine "
                    "keeps no gradient and no optimizer state for it; leave it trainable in xds.initialize and "
                    "freeze it afterwards (that may be undone), or engine.destroy() and initialize again"
                )


__all__ = ["DtypeGuard"]
