"""`deepspeed.runtime.rollout.base`: a request for generated text, its answer, and the class of generators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from ...missing import placeholder


@final
@dataclass
class RolloutConfig:
    """Which generator, and whether it records CUDA graphs."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


@final
@dataclass
class SamplingConfig:
    """How tokens are drawn. `top_k` of 0 or less: from all of them."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None


@final
@dataclass
class RolloutRequest:
    """Prompts, padded on the left.

    Attributes:
        prompt_ids: [prompts, tokens].
        prompt_attention_mask: [prompts, tokens]; 1 where a token is not padding.
    Raises:
        ValueError: other shapes.
    """

    prompt_ids: Tensor
    prompt_attention_mask: Tensor

    def __post_init__(self) -> None:
        _check_pair(self, "prompt_ids", "prompt_attention_mask")


@final
@dataclass
class RolloutBatch:
    """Prompts and responses, padded on the right to the longest.

    Attributes:
        input_ids, attention_mask: [sequences, tokens].
        response_start_idx: [sequences], the column of the first token of the response.
    Raises:
        ValueError: other shapes.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: Tensor

    def __post_init__(self) -> None:
        _check_pair(self, "input_ids", "attention_mask")
        if self.response_start_idx.shape != (self.batch_size,):
            shape = tuple(self.response_start_idx.shape)
            raise ValueError(
                f"response_start_idx must be 1-D of length {self.batch_size}, and has shape {shape}"
            )

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return int(self.input_ids.shape[0])

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence, with padding."""
        return int(self.input_ids.shape[1])


class RolloutEngine(ABC):
    """A generator."""

    name: str = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Prompts with their responses, `n_samples_per_prompt` for each."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Take over the weights of the training engine, where the generator has its own."""

    def shutdown(self) -> None:  # noqa: B027 (a generator without resources has nothing to do)
        """Release what the generator holds."""


def _check_pair(owner: Any, ids: str, mask: str) -> None:
    shape, other = tuple(getattr(owner, ids).shape), tuple(getattr(owner, mask).shape)
    if len(shape) != 2:
        raise ValueError(f"{ids} must be 2-D, and has shape {shape}")
    if other != shape:
        raise ValueError(f"{mask} has shape {other}, which does not match {shape} of {ids}")


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
