"""Optimizers whose update is not per element: on flat shards their numbers differ from those of plain torch.

`zero_allow_untested_optimizer` lets any optimizer step on shards. transformers and accelerate set it for every
optimizer, so it does not mean that somebody looked at this one. These are known to be wrong there.
"""

from __future__ import annotations

import torch

from ...ops.optim.shard_optimizer import ShardOptimizer

# by the names of their classes: they come from libraries that may not be installed
SHAPE_SEEING = frozenset(
    "Adafactor AdaFactor CAME SM3 AdaLomo "  # factors of rows and columns
    "Lamb LAMB FusedLAMB FusedMixedPrecisionLamb Lars LARS NovoGrad FusedNovoGrad "  # norms of a parameter
    "AdamP SGDP Fromage StableAdamW StableAdamWUnfused AdamMini Adam_mini Adalite "
    "Shampoo ScalableShampoo DistributedShampoo SOAP PSGD KFAC "  # products of a matrix with itself
    "Muon MuonWithAuxAdam SingleDeviceMuon SingleDeviceMuonWithAuxAdam AdaMuon MuonClip Dion Scion "
    "GaLoreAdamW GaLoreAdamW8bit GaLoreAdafactor APOLLOAdamW QAPOLLOAdamW".split()  # projections
)


def sees_shapes(kind: type[torch.optim.Optimizer]) -> bool:
    """`kind`, or a class that it is made from, has a name in `SHAPE_SEEING`, and is not one of xds's own."""
    if issubclass(kind, ShardOptimizer):  # these get the shapes and the other ranks' parts
        return False
    return any(base.__name__ in SHAPE_SEEING for base in kind.__mro__)


def warning_text(name: str) -> str:
    """What `name` does at zero_optimization.stage 1 to 3, and what to use instead."""
    return (
        f"{name}: its update depends on the shape or the norm of a whole parameter, but at "
        "zero_optimization.stage >= 1 it gets 1-D shards, so training differs from that without ZeRO; "
        "zero_allow_untested_optimizer is true (transformers and accelerate set it), so it steps all the same. "
        "Use zero_optimization.stage = 0, AdamW, or optimizer.type = Lamb or Muon in the config"
    )


def refusal_text(name: str, elementwise: str) -> str:
    """Why `name` is refused on shards. elementwise: names of the optimizers to use instead."""
    return (
        f"{name}: this optimizer may use the shape of a parameter, and with zero_optimization.stage >= 1 "
        f"it would see 1-D shards; use zero_optimization.stage = 0, one of {elementwise}, Lamb, Lion or Muon, "
        "or set zero_allow_untested_optimizer to true if its arithmetic is per element"
    )
