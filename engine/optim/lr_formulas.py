"""Formulas of the learning-rate schedules: pure functions of the iteration.

The iteration `t` is `last_batch_iteration`: -1 before the first `step()` of a schedule, 0 after it.

Source: Smith, A disciplined approach to neural network hyper-parameters, 2018,
https://arxiv.org/abs/1803.09820 (lr_range_factor, Cycle). The values equal DeepSpeed's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def lr_range_factor(t: int, *, step_size: int, step_rate: float, staircase: bool) -> float:
    """Factor on the minimum lr: 1 + rate * (t + 1) / size, with the quotient floored if `staircase`."""
    interval = (t + 1) / step_size
    return 1 + step_rate * (math.floor(interval) if staircase else interval)


def warmup_ratio(t: int, *, num_steps: int, shape: str) -> float:
    """Fraction of the way from minimum to maximum, 0 to 1: t / W, or ln(t + 1) / ln(W) for "log"."""
    if t < 0:
        return 0.0
    if t >= num_steps:
        return 1.0
    return math.log(t + 1) * (1.0 / math.log(num_steps)) if shape == "log" else t / num_steps


def linear_decay_ratio(t: int, *, num_warmup_steps: int, num_total_steps: int) -> float:
    """Fraction of the peak that remains after warm-up: (T - t) / (T - W), never below 0."""
    return max(0.0, (num_total_steps - t) / max(1.0, num_total_steps - num_warmup_steps))


def cosine_ratio(t: int, *, num_warmup_steps: int, num_total_steps: int, min_ratio: float) -> float:
    """Half a cosine from 1 to `min_ratio` over the steps after warm-up, then constant."""
    progress = min(1.0, (t - num_warmup_steps + 1) / max(1, num_total_steps - num_warmup_steps))
    return max(0.0, min_ratio + (1.0 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


@dataclass(frozen=True)
class Cycle:
    """Rises for `first_size` steps and falls for `second_size`, optionally in stairs.

         1 |    /\\
           |   /  \\          height(t): 0 at both ends, 1 at the top
         0 |  /    \\______
             first second decay
    """

    first_size: float
    second_size: float
    first_stairs: int = 0
    second_stairs: int = 0

    @property
    def total_size(self) -> float:
        return self.first_size + self.second_size

    def height(self, t: int) -> float:
        """Height at iteration `t`, 0 to 1."""
        position = (t + 1) % self.total_size
        rising = position <= self.first_size
        if rising:
            height, stairs = position / self.first_size, self.first_stairs
        else:
            height, stairs = (self.total_size - position) / self.second_size, self.second_stairs
        if stairs > 0:
            # not floor(height * stairs): a rounding error at the top would lose a whole stair
            size = self.first_size if rising else self.second_size
            distance = position if rising else self.total_size - position
            height = math.floor(distance * stairs / size) / stairs
        return height
