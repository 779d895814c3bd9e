"""Puts the tokens of pictures between those of text, and cuts the result over the sequence ranks."""

from __future__ import annotations

from abc import ABC
from typing import Any, final

import torch
from torch import Tensor, nn

from .. import comm as dist
from ..missing import placeholder
from .gathered import gather_tokens

_DEFAULT_IMAGE_TOKEN_ID = -200  # LLaVA's


class _Fusion(nn.Module, ABC):
    """Projects this rank's tokens of pictures, gathers all, and returns this rank's tokens of the whole."""

    def __init__(self, projection: nn.Module, process_group: Any) -> None:
        super().__init__()
        self.projection = projection
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)

    def forward(self, visual_features: Tensor, text_embeds: Tensor, input_ids: Tensor) -> Tensor:
        """A collective. The whole is padded with zeros to a multiple of the ranks.

        Args:
            visual_features: [B, own tokens of pictures, their width], the same number on each rank.
            text_embeds: [B, tokens, H], all of them.
            input_ids: [B, tokens]: where the pictures belong.
        Returns:
            [B, own tokens, H].
        """
        own = self.projection(visual_features)
        lengths = [own.shape[1]] * self.world_size
        pictures = gather_tokens(own, lengths, self.process_group)
        whole = self._splice_visual_into_text(text_embeds, pictures, input_ids)
        length = -(-whole.shape[1] // self.world_size)
        padding = length * self.world_size - whole.shape[1]
        padded = nn.functional.pad(whole, (0, 0, 0, padding))
        start = dist.get_rank(self.process_group) * length
        return padded[:, start : start + length].contiguous()

    def _splice_visual_into_text(
        self, text_embeds: Tensor, visual_embeds: Tensor, input_ids: Tensor
    ) -> Tensor:
        """[B, tokens, H] and all tokens of pictures -> [B, tokens of the whole, H]."""
        raise NotImplementedError(
            f"{type(self).__name__}._splice_visual_into_text: models differ in it; derive a class and override "
            "it, or use the adapter of the model"
        )


class ModalityFusionSPAdapter(_Fusion):
    """To derive from."""

    def __init__(
        self,
        projection: nn.Module,
        process_group: Any,
        image_token_id: int = _DEFAULT_IMAGE_TOKEN_ID,
    ) -> None:
        """image_token_id: where a picture belongs in the text."""
        super().__init__(projection, process_group)
        self.image_token_id = image_token_id


@final
class LlavaFusionAdapter(ModalityFusionSPAdapter):
    """LLaVA's: one token of the text stands for a picture; pictures of a sample have equal lengths."""

    def _splice_visual_into_text(
        self, text_embeds: Tensor, visual_embeds: Tensor, input_ids: Tensor
    ) -> Tensor:
        rows = [
            self._row(text, pictures, (ids == self.image_token_id).nonzero().flatten().tolist())
            for text, pictures, ids in zip(text_embeds, visual_embeds, input_ids, strict=True)
        ]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def _row(self, text: Tensor, pictures: Tensor, places: list[int]) -> Tensor:
        """One sample, [tokens, H]."""
        if not places:
            return text
        parts, start = [], 0
        for place, picture in zip(places, pictures.chunk(len(places)), strict=True):
            parts += [text[start:place], picture]
            start = place + 1
        return torch.cat([*parts, text[start:]])


@final
class InternVLFusionAdapter(ModalityFusionSPAdapter):
    """InternVL's: the text has one token for each token of a picture."""

    def _splice_visual_into_text(
        self, text_embeds: Tensor, visual_embeds: Tensor, input_ids: Tensor
    ) -> Tensor:
        return _filled(text_embeds, visual_embeds, input_ids == self.image_token_id)


@final
class Qwen2VLFusionAdapter(_Fusion):
    """Qwen2-VL's: as many tokens as the picture has stand between a start and an end."""

    def __init__(
        self,
        projection: nn.Module,
        process_group: Any,
        vision_start_token_id: int,
        vision_end_token_id: int,
    ) -> None:
        super().__init__(projection, process_group)
        self.vision_start_token_id = vision_start_token_id
        self.vision_end_token_id = vision_end_token_id

    def _splice_visual_into_text(
        self, text_embeds: Tensor, visual_embeds: Tensor, input_ids: Tensor
    ) -> Tensor:
        starts, ends = (
            input_ids == self.vision_start_token_id,
            input_ids == self.vision_end_token_id,
        )
        is_inside = starts.cumsum(1) > ends.cumsum(1)
        return _filled(text_embeds, visual_embeds, is_inside & ~starts)


def _filled(text: Tensor, pictures: Tensor, places: Tensor) -> Tensor:
    """`text`, whose tokens at `places` [B, tokens] are those of the pictures, in order."""
    found = text.clone()
    for row, place in enumerate(places):
        found[row, place] = pictures[row, : int(place.sum())].to(found.dtype)
    return found


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = [
    "InternVLFusionAdapter",
    "LlavaFusionAdapter",
    "ModalityFusionSPAdapter",
    "Qwen2VLFusionAdapter",
]
