"""The words in which a start line describes a run: "stage 3, 2 ranks, bf16"."""

from __future__ import annotations

from ..config.config import Config


def run_in_words(config: Config, num_ranks: int) -> str:
    """The ZeRO stage, the number of ranks and the precision."""
    precision = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    return f"stage {config.zero_optimization.stage}, {ranks}, {precision}"
