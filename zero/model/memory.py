"""The memory of a sharded model: the bytes of its states, and the tensors that may be moved away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from ...offload.interfaces import Shard
from ...ops.coded import state_bytes
from ...ops.pool import BufferPool
from ..core.grad_bucket import GradBucket
from ..core.unit import Unit
from ..layout.groups import FlatGroups


@final
class Memory:
    """Parameters, gradients and buckets of all units on this rank."""

    def __init__(
        self,
        units: Sequence[Unit],
        grads: Sequence[GradBucket],
        pool: BufferPool,
        groups: FlatGroups,
        frozen: Sequence[Tensor],
    ) -> None:
        """frozen: parameters that are in no unit, below stage 3."""
        self._frozen = frozen
        self._params = [flat for unit in units for flat in unit.params]
        self._trained = [
            pair for unit in units for pair in zip(unit.params, unit.grads, strict=False)
        ]
        self._grads = grads
        self._pool = pool
        self._groups = groups

    def host_bytes(self) -> int:
        """Bytes of shards of parameters in host memory."""
        return sum(place.tensor.nbytes for place in self._on_host() if not place.is_on_disk)

    def disk_bytes(self) -> int:
        """Bytes of shards of parameters on a disk."""
        return sum(place.tensor.nbytes for place in self._on_host() if place.is_on_disk)

    def _on_host(self) -> list[Shard]:
        return [flat.stored_shard for flat in self._params if flat.is_on_host]

    def release_gradients(self) -> None:
        """Free all gradient buffers; the next backward allocates them again."""
        for grads in self._grads:
            grads.total.release()
        self._pool.clear()

    def param_tensors(self) -> list[Tensor]:
        """The tensors that hold parameters: shards, without those on a disk, and full buffers."""
        shards = [flat.shard for flat in self._params if not flat.stored_shard.is_on_disk]
        return shards + [flat.raw for flat in self._params]

    def hide_whole_params(self, hides: bool) -> None:
        """With `hides` parameters read as NaN until `show_whole_params`."""
        for flat in self._params if hides else []:
            flat.hide()

    def show_whole_params(self) -> None:
        """End `hide_whole_params`."""
        for flat in self._params:
            flat.show()

    def numel(self) -> int:
        """Elements of all parameters of this rank's part of the model, sharded or not."""
        in_flats = sum(flat.layout.payload_numel for flat in self._params)
        return in_flats + sum(param.numel() for param in self._frozen)

    def expected_bytes(self, num_states: int) -> tuple[int, int]:
        """Bytes of parameters, gradients, masters and optimizer states on a rank, and without sharding.

        Wherever they are stored. Without temporary buffers, and without what one optimizer keeps besides.

        Args:
            num_states: state tensors of the optimizer, of the size of a parameter.
        """
        own_bytes = whole_bytes = self._frozen_bytes()
        for flat in self._params:
            numel, shard_numel, size = (
                flat.layout.numel,
                flat.layout.shard_numel,
                flat.dtype.itemsize,
            )
            own_bytes += (shard_numel if flat.shards_params else numel) * size
            whole_bytes += numel * size
        for params, grads in self._trained:
            policy, dtype = grads.group.policy, params.dtype
            numel, shard_numel = grads.layout.numel, grads.layout.shard_numel
            is_beside = not (params.is_on_host or grads.total.store.is_on_host)
            master_bytes = policy.master_bytes(dtype, is_beside=is_beside)
            sum_bytes = policy.sum_dtype(dtype).itemsize
            updated = shard_numel if policy.shards_optimizer else numel
            own_bytes += (shard_numel if policy.shards_grads else numel) * sum_bytes
            own_bytes += updated * master_bytes
            own_bytes += num_states * state_bytes(updated, policy.state_dtype(dtype))
            whole_bytes += numel * (master_bytes + sum_bytes)
            whole_bytes += num_states * state_bytes(numel, policy.state_dtype(dtype))
        return own_bytes, whole_bytes

    def state_bytes(self) -> dict[str, int]:
        """Bytes on this rank: parameters, gradients, and the shared temporary buffers (buckets).

        Memory that several ranks have in common counts in parts.
        """
        params = sum(
            flat.shard.nbytes if flat.shards_params else flat.full_bytes // flat.memory.num_holders
            for flat in self._params
            if not flat.is_on_host
        )
        return {
            "param": self._frozen_bytes()
            + params
            + sum(flat.sender.held_bytes for flat in self._params),
            "grad": sum(grads.held_bytes for grads in self._grads),
            "buckets": self._pool.allocated_bytes + self.gathered_bytes() + self._scratch_bytes(),
        }

    def gathered_bytes(self) -> int:
        """Bytes of the whole buffers of sharded parameters that are in memory now."""
        return sum(
            flat.full_bytes
            for flat in self._params
            if flat.shards_params and flat.raw.untyped_storage().nbytes()
        )

    def _frozen_bytes(self) -> int:
        return sum(param.nbytes for param in self._frozen)

    def _scratch_bytes(self) -> int:
        """Bytes of the receive buffers of all groups."""
        return sum(collectives.scratch_bytes for collectives in self._groups.opened)
