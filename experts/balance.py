"""How many tokens each expert gets: counted on all ranks, reported, and evened out by the routers' biases.

Source of the biases: Wang et al., Auxiliary-Loss-Free Load Balancing, 2024, https://arxiv.org/abs/2408.15664,
algorithm 1: once a step each bias moves by a fixed amount, up where its expert got less than the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ..ops.comm.collectives import Collectives
from ..ops.comm.exchange import all_gather_json
from ..ops.device import device_of
from ..utils.errors import UsageError
from .config import BIASES
from .layer import ExpertLayer


def find_bias(model: nn.Module, layer: str, num_experts: int) -> Tensor:
    """The bias, a buffer, by which the router beside the module of experts `layer` chooses.

    Raises:
        UsageError: there is none.
    """
    block = model.get_submodule(layer.rpartition(".")[0])
    found = [
        tensor
        for name, tensor in block.named_buffers()
        if name.rpartition(".")[2] in BIASES and tensor.shape == (num_experts,)
    ]
    if len(found) != 1:
        raise UsageError(
            f"expert_parallel.load_balance_coeff: the router of {layer} has no buffer by which it chooses "
            f"({', '.join(BIASES)}); use a model that has one, or the model's own balancing loss, and remove "
            "the key"
        )
    return found[0]


@final
class Balance:
    """The tokens of each expert in the last step, over all ranks. Every rank has those of all its stages."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        world: Collectives,
        biases: Sequence[Tensor],
        coefficient: float,
        num_stages: int,
    ) -> None:
        """biases: of each layer, or none. coefficient: how far a bias moves in a step.

        num_stages: of pipelines.
        """
        self._layers, self._world = layers, world
        self._biases, self._coefficient = biases, coefficient
        self._num_stages = num_stages
        self._sizes: dict[str, int] = {}  # experts of the layers of all stages, by name
        self._rows: list[int] = []  # of this rank's layers
        self._totals: Tensor | None = None
        self._step = 0

    def begin(self) -> None:
        """The engine is ready. With several pipeline stages a collective: agree on the layers of all."""
        mine = [(layer.name, layer.num_experts) for layer in self._layers]
        parts: list[Any] = [mine]
        if self._num_stages > 1:
            parts = all_gather_json(self._world, mine, "the layers with experts")
        self._sizes = {name: size for part in parts for name, size in part}
        places = {name: row for row, name in enumerate(self._sizes)}
        self._rows = [places[layer.name] for layer in self._layers]

    def advance(self, step: int) -> None:
        """So many steps have updated the parameters. A collective: 8 bytes for each expert and rank."""
        shape = len(self._sizes), max(self._sizes.values(), default=0) + 1
        device = self._world.device
        # whole numbers; the sums of memory that ranks share are of floats
        dtype = torch.float64 if device_of(device).has_fp64 else torch.int64
        totals = torch.zeros(shape, dtype=dtype, device=device)
        for row, layer in zip(self._rows, self._layers, strict=True):
            counts = layer.take_counts()
            totals[row, : layer.num_experts] = counts[:-1]
            totals[row, -1] = counts[-1]
        self._world.sum(totals, what="tokens of experts", kind="control")
        self._totals, is_applied, self._step = totals, step > self._step, step
        if not is_applied:  # the step was skipped
            return
        for row, layer, bias in zip(self._rows, self._layers, self._biases, strict=False):
            counts = totals[row, : layer.num_experts]
            with torch.no_grad():
                below_mean = torch.sign(counts.sum() - len(counts) * counts)
                bias += self._coefficient * below_mean.to(bias)

    def resume(self, step: int) -> None:
        """The same after a load. Tokens of a step that it has ended do not count."""
        self._totals, self._step = None, step
        for layer in self._layers:
            layer.take_counts()

    # -- what is reported -------------------------------------------------------------------------------

    def rows(self) -> list[tuple[str, list[int], int]]:
        """Name, tokens of each expert, dropped pairs, of each layer in the last step. Waits for the device."""
        if self._totals is None:
            return []
        table = self._totals.long().tolist()
        return [
            (name, row[:size], row[-1])
            for (name, size), row in zip(self._sizes.items(), table, strict=True)
        ]

    def events(self) -> list[tuple[str, float]]:
        """The tokens of the fullest expert over the mean, of the worst layer; the share of dropped pairs."""
        rows = self.rows()
        kept, dropped = sum(sum(row[1]) for row in rows), sum(row[2] for row in rows)
        worst = max((imbalance(counts) for _, counts, _ in rows), default=0.0)
        share = dropped / (kept + dropped) if kept + dropped else 0.0
        return [("expert_imbalance", worst), ("expert_drop_share", share)]

    def text(self) -> str:
        """The same for a line of the log."""
        (_, worst), (_, share) = self.events()
        return f"fullest expert {worst:.2f} x mean" + (f", {share:.1%} dropped" if share else "")

    def line(self) -> dict[str, Any]:
        """The line of a record."""
        layers = [{"name": name, "counts": counts, "dropped": n} for name, counts, n in self.rows()]
        return {"kind": "experts", "layers": layers}


def imbalance(counts: Sequence[int]) -> float:
    """The largest count over their mean; 0 without tokens.

    >>> imbalance([3, 1, 0, 0])
    3.0
    """
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 0.0


__all__ = ["Balance", "find_bias", "imbalance"]
