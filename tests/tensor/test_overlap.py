"""Tests of tp_overlap_comm: the same bits, and the sum of input gradients travels while weights get theirs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from tensor_cases import Case, batches, build
from torch import Tensor
from warm_ranks import warm

import xds
from xds.ops.comm.handles import Handle
from xds.tensor import compiled, overlap

Found = tuple[list[tuple[float, float]], dict[str, Tensor]]


def train(case: Case, overlaps: bool, kind: str) -> Found:
    config = case.config()
    config["tensor_parallel"]["tp_overlap_comm"] = overlaps
    model = build(case.model)
    if kind == "recomputed":
        config["activation_checkpointing"] = {"enabled": True}
    if kind == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if kind == "bf16":
        config["bf16"] = {"enabled": True}
    if kind == "head":
        config["tensor_parallel"]["vocab_parallel_lm_head"] = True
    if kind == "zero_bubble":
        config["pipeline"]["schedule"] = "zero_bubble"
    if kind == "frozen":  # weights of some layers, the bias of others
        for name, param in model.named_parameters():
            param.requires_grad_("1." not in name and "q_proj" not in name)
    engine = xds.initialize(model, config)
    found = []
    for step in range(3):
        loss = engine.train_batch(batches(case.model, step, engine.dp_rank))
        found.append((loss.item(), engine.get_global_grad_norm()))
    values = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return found, values


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (Case("gpt2", 1, 1, 1, 2, 3), "recomputed"),
        (Case("llama", 1, 1, 1, 2, 1), "frozen"),
        *(
            pytest.param(Case(*case), kind, marks=pytest.mark.slow)
            for case, kind in (
                (("llama", 1, 1, 1, 2, 0), "autocast"),
                (("qwen3", 1, 1, 1, 2, 2), "bf16"),
                (("llama", 1, 2, 1, 2, 3), "head"),
                (("gpt", 1, 1, 1, 2, 0), "plain"),
                (("gpt", 2, 1, 1, 2, 1), "zero_bubble"),
                (("gpt2", 2, 1, 1, 2, 3), "recomputed"),
                (("llama", 1, 1, 2, 2, 2), "plain"),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_numbers_have_the_same_bits(case: Case, kind: str) -> None:
    ranks = warm(case.mesh.size)
    with_it, without = (ranks.run(train, case, overlaps, kind) for overlaps in (True, False))
    for (steps, values), (other_steps, other_values) in zip(with_it, without, strict=True):
        assert steps == other_steps
        assert all(torch.equal(value, other_values[name]) for name, value in values.items())


def events_of_a_backward() -> list[str]:
    case = Case("llama", 1, 1, 1, 2, 0)
    config = case.config() | {"gradient_accumulation_steps": 1}
    config["tensor_parallel"]["tp_overlap_comm"] = True
    engine = xds.initialize(build("llama"), config)
    engine.train_batch(batches("llama", 0, 0))  # the slices are proven in the first forward
    loss = engine(**next(batches("llama", 1, 0))).loss
    seen: list[str] = []
    start, weight = compiled.start_sum, overlap.weight_grad

    class Seen(Handle):
        def __init__(self, handle: Any) -> None:
            self._handle = handle

        def wait(self) -> None:
            seen.append("wait")
            self._handle.wait()

    def spied_start(*args: Any) -> Any:
        total, handle = start(*args)
        if "gradient of the input" not in args[2]:
            return total, handle
        seen.append("start")
        return total, Seen(handle)

    def spied_weight(*args: Any, **kwargs: Any) -> Tensor:
        seen.append("weight")
        return weight(*args, **kwargs)

    with (
        mock.patch.object(compiled, "start_sum", spied_start),
        mock.patch.object(overlap, "weight_grad", spied_weight),
    ):
        engine.backward(loss)
    engine.destroy()
    return seen


def test_weights_get_their_gradients_while_the_sum_travels() -> None:
    of_mlp, of_attention = ["start", *["weight"] * 2, "wait"], ["start", *["weight"] * 3, "wait"]
    for seen in warm(2).run(events_of_a_backward):
        assert seen[-8:] == [*of_mlp[-3:], *of_attention] or seen[-9:] == of_mlp + of_attention
        assert seen == ["start", "weight", "wait", *4 * (of_mlp + of_attention)]
