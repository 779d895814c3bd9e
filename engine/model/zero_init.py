"""`xds.zero.Init`: constructs a model in shards, if the config's ZeRO stage is 3.

It is part of the engine package because it reads the whole config and initializes torch.distributed.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from ...ops.comm.opening import open_collectives
from ...utils.arguments import wrong
from ...utils.host_memory import keep_freed_blocks, return_freed_blocks
from ...zero.construction.construction import Construction
from ...zero.construction.slices import SliceStore
from ..config.config import parse_config
from ..process.process import join, pick_device


@final
class Init:
    """Shards modules while they are constructed: a rank holds its slices, and one module's whole parameters.

        with xds.zero.Init("config.json"):
            model = Model()
        engine = xds.initialize(model, "config.json")

    Values are bit-equal to plain construction under the same seed, at every number of ranks. The context does
    nothing unless the config's stage is 3 and there are several ranks. Until `xds.initialize`, parameters read
    as NaN; `xds.zero.GatheredParameters` reads and edits them. A collective: all ranks build the same model.
    A context inside another one does nothing: the outer one shards.

    store: the owner of the slices; None where nothing is sharded. is_at_stage_3: there may be one rank only.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        module: nn.Module | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            config: the config that `xds.initialize` will get; None means stage 3.
            module: a model to shard at once, instead of using the context.
            dtype: the dtype of the slices. It saves memory where the model is built in fp32 but computes in
                16 bits. An in-place product or sum on a parameter of a finished module (not a new random
                initialization) then uses rounded values. None keeps the dtype of construction, which is exact.
            enabled: False makes the context do nothing.
            group: the data-parallel ranks; None means all ranks.

        Raises:
            ConfigError: every complaint about the config at once. UsageError: `module` is none.
        """
        if not isinstance(module, nn.Module | None):
            raise wrong("zero.Init: module", module, "a torch.nn.Module object, or None")
        self._construction: Construction | None = None
        self.store: SliceStore | None = None
        self.is_at_stage_3 = enabled and (
            config is None or parse_config(config).zero_optimization.stage == 3
        )
        if not self.is_at_stage_3:
            return
        device = pick_device()
        world = join(device)
        group = group or world
        if group.size() > 1:
            self.store = SliceStore(open_collectives(group, device), dtype)
            self._construction = Construction(self.store)
            if module is not None:
                with self._construction:
                    self._construction.add_module(module)

    def __enter__(self) -> Init:
        if self._construction is not None and not _open:
            return_freed_blocks()
            self._construction.__enter__()
            _open.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._construction is not None and _open == [self]:
            _open.pop()
            self._construction.__exit__(kind, error, trace)
            keep_freed_blocks()


# The context that shards what is built now: at most one, because torch tells it of all modules of the process
_open: list[Init] = []


__all__ = ["Init"]
