"""A ZeRO stage as three booleans, and the dtypes of computation, gradient sums and messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Policy:
    """What is sharded and in which dtype gradients are summed and sent.

    shards_optimizer, shards_grads, shards_params: the stage (Rajbhandari et al., ZeRO, 2020, section 5).
    compute: dtype that floating parameters are cast to; None leaves them as they are.
    accumulate: dtype of gradient sums; None is fp32 for 16-bit parameters, else the parameter's own.
    communicate: dtype in which gradients are sent; None is the parameter's own.
    holds_grads: several micro-batches are summed on the rank before the reduction.
    """

    shards_optimizer: bool
    shards_grads: bool
    shards_params: bool
    compute: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    communicate: torch.dtype | None = None
    holds_grads: bool = False

    @classmethod
    def of_stage(
        cls,
        stage: int,
        *,
        world_size: int,
        accumulation_steps: int = 1,
        offloads: bool = False,
        offloads_params: bool = False,
        compute: torch.dtype | None = None,
        accumulate: torch.dtype | None = None,
        communicate: torch.dtype | None = None,
    ) -> Policy:
        """The policy of a ZeRO stage. With one rank nothing is sharded.

        offloads: the optimizer runs on the host. Then also one rank frees gradients after each backward.
        offloads_params: shards of stage 3 are on the host. Then also one rank drops its parameters.
        """
        effective = stage if world_size > 1 or offloads_params else 0
        frees = effective >= 2 or (offloads and world_size == 1)
        return cls(
            shards_optimizer=effective >= 1 and world_size > 1,
            shards_grads=frees,
            shards_params=effective >= 3,
            compute=compute,
            accumulate=accumulate,
            communicate=communicate,
            holds_grads=not frees and accumulation_steps > 1,
        )

    def param_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype a parameter of `original` dtype computes in."""
        if self.compute is not None and original.is_floating_point and original.itemsize > 1:
            return self.compute
        return original

    def sum_dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a parameter are summed."""
        return self.accumulate or master_dtype(param_dtype)

    def sent_dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a parameter are sent."""
        return self.communicate or param_dtype


def master_dtype(param_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the copy that the optimizer updates: fp32 for 16-bit parameters, else their own."""
    return torch.float32 if param_dtype in LOW_PRECISION else param_dtype
