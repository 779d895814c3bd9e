"""Fills the device with masters and optimizer states after the first steps: a ratio of "auto".

steps 1, 2    all masters on the host; the device's memory is measured
then          | unit 0: device | unit 1: device | unit 2: host | ...    the first ones in forward, as they fit
"""

from __future__ import annotations

import logging
from typing import final

import torch

from ...offload.device_memory import DeviceMemory
from ...ops.device import wide_place
from ...utils.sizes import size_text
from ..core.master import Master
from .sharded_model import ShardedModel
from .state_memory import StateMemory
from .update import Updater

log = logging.getLogger("xds")

MEASURED_UPDATES = 2  # the first one makes the states, the second one is like all others


@final
class AutoRatio:
    """Moves masters and states from the host to the device, once, as many as fit on every rank."""

    def __init__(self, model: ShardedModel, updater: Updater, memory: DeviceMemory) -> None:
        self._model = model
        self._updater = updater
        self._memory = memory
        self._num_updates = 0
        memory.begin()

    def after_update(self) -> None:
        """An update is over and its gradients are dropped. On all ranks together."""
        self._num_updates += 1
        if self._num_updates != MEASURED_UPDATES:
            return
        spare_bytes = self._memory.spare_bytes()
        if spare_bytes is None:
            self._say("the device is a CPU, so all optimizer states stay on the host")
            return
        self._fill(self._least(spare_bytes))

    def _least(self, number: int) -> int:
        """The smallest number of all ranks. Sends 8 bytes to each rank."""
        collectives = self._model.collectives
        own_number = torch.tensor(
            [number], dtype=torch.float64, device=wide_place(collectives.device)
        )
        return int(collectives.gather_small(own_number).min())

    def _fill(self, spare_bytes: int) -> None:
        self._model.gather_deferred()
        self._updater.wait()
        moved, left = 0, spare_bytes
        memory = StateMemory(self._updater)
        for master in self._updater.masters:
            need = memory.bytes_on_device(master)
            if need > left:
                break  # the masters after it are used later
            left -= need
            memory.move_to_device(master)
            moved += 1
        masters = self._updater.masters
        share = _numel(masters[:moved]) / max(_numel(masters), 1)
        self._say(
            f"{size_text(spare_bytes)} of the device were free on every rank after {MEASURED_UPDATES} updates, "
            f"so {share:.0%} of the optimizer states are on the device now, and the rest stays on the host"
        )

    def _say(self, text: str) -> None:
        if self._model.collectives.rank == 0:
            log.info('offload_optimizer.ratio = "auto": %s', text)


def _numel(masters: list[Master]) -> int:
    return sum(master.raw.numel() for master in masters)


__all__ = ["AutoRatio"]
