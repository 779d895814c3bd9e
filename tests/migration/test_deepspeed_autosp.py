"""Tests of `deepspeed.sequence.auto_sp` and its parts: pictures of models whose tokens are cut over ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from warm_ranks import warm

from xds.deepspeed.sequence.auto_sp import auto_wrap_model_for_sp
from xds.deepspeed.sequence.autosp_fusion import (
    InternVLFusionAdapter,
    LlavaFusionAdapter,
    ModalityFusionSPAdapter,
    Qwen2VLFusionAdapter,
)
from xds.deepspeed.sequence.autosp_vit import UlyssesSPViTAttention

PICTURE, START, END = -200, 7, 8


class CLIPAttention(nn.Module):
    """Each token sees all others; found by the name of its class. Returns a tuple, as in transformers."""

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> tuple[Tensor, None]:
        x = hidden_states
        return (x @ x.transpose(1, 2) * scale).softmax(-1) @ x, None


class LlamaAttention(nn.Module):
    pass


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList([CLIPAttention()])
        self.mm_projector = nn.Linear(2, 2)
        self.text = nn.ModuleList([LlamaAttention()])


def attention_of_cut_pictures() -> None:
    """Five patches on two ranks, after one token that both have."""
    rank, model = dist.get_rank(), Pictures()
    assert auto_wrap_model_for_sp(model, dist.group.WORLD) is model
    wrapped = model.vision[0]
    assert isinstance(wrapped, UlyssesSPViTAttention) and type(model.text[0]) is LlamaAttention
    torch.manual_seed(0)
    whole = torch.randn(2, 6, 4, requires_grad=True)
    expected = CLIPAttention()(whole, scale=0.5)[0]
    cut = slice(1, 4) if rank == 0 else slice(4, 6)
    part = torch.cat([whole[:, :1], whole[:, cut]], 1).detach().requires_grad_()
    found, nothing = (*wrapped(part, scale=0.5), None)[:2]
    assert nothing is None
    wanted = torch.cat([expected[:, :1], expected[:, cut]], 1)
    torch.testing.assert_close(found, wanted)

    # the token that both ranks have is in both losses
    weight = torch.ones(6)
    weight[0] = 2
    (expected.square().sum(2) * weight).sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(part.grad[:, 1:], whole.grad[:, cut])


def test_attention_over_cut_patches_equals_that_over_all_with_its_gradients() -> None:
    warm(2).run(attention_of_cut_pictures)


def joined(kind: type[nn.Module], ids: list[list[int]], num_tokens: int, **options: Any) -> Tensor:
    """The tokens of both ranks; text is 1, 2, ... and pictures are -1, -2, ..."""
    text = torch.arange(1.0, 1 + len(ids[0])).repeat(len(ids), 1).unsqueeze(2)
    pictures = -torch.arange(1.0, 1 + num_tokens).repeat(len(ids), 1).unsqueeze(2)
    own = pictures.chunk(2, 1)[dist.get_rank()].clone().requires_grad_()
    adapter: Any = kind(nn.Identity(), dist.group.WORLD, **options)
    part = adapter(own, text, torch.tensor(ids))
    part.sum().backward()
    assert (own.grad <= 1).all()
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.detach())
    return torch.cat(parts, 1).squeeze(2)


def fused() -> list[list[list[float]]]:
    ids = [[0, PICTURE, 0, PICTURE, 0], [0, 0, 0, 0, 0]]
    llava = joined(LlavaFusionAdapter, ids, 4)
    intern = joined(InternVLFusionAdapter, [[0, 9, 9, 0]], 2, image_token_id=9)
    boundaries = {"vision_start_token_id": START, "vision_end_token_id": END}
    qwen = joined(Qwen2VLFusionAdapter, [[START, 0, END, 5, START, 0, END]], 2, **boundaries)
    return [llava.tolist(), intern.tolist(), qwen.tolist()]


def test_pictures_stand_where_the_text_has_their_tokens_and_padding_at_the_end() -> None:
    llava = [[1, -1, -2, 3, -3, -4, 5, 0], [1, 2, 3, 4, 5, 0, 0, 0]]
    intern, qwen = [[1, -1, -2, 4]], [[1, -1, 3, 4, 5, -2, 7, 0]]
    assert warm(2).run(fused) == [[llava, intern, qwen]] * 2


def refused_and_left() -> tuple[str, str, list[str]]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("xds.deepspeed.sequence.auto_sp")
    logger.addHandler(handler)
    auto_wrap_model_for_sp(Pictures(), dist.group.WORLD)
    logger.removeHandler(handler)
    with pytest.raises(ValueError) as unknown:
        auto_wrap_model_for_sp(nn.Linear(1, 1), dist.group.WORLD)
    with pytest.raises(NotImplementedError) as own:
        joined(ModalityFusionSPAdapter, [[0]], 2)
    return str(unknown.value), str(own.value), heard


def test_what_is_left_to_the_script_is_said() -> None:
    for unknown, own, heard in warm(2).run(refused_and_left):
        assert "no recognisable attention modules found in Linear" in unknown
        assert "override it" in own
        text, projection = heard
        assert "text.0 (LlamaAttention) is left" in text and "mm_projector is left" in projection
