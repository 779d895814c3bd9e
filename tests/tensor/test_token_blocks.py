"""Tests of the word sequence_parallel: tensor ranks have some tokens of the activations between layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import run_ranks
from pipeline_runs import SAME, worst
from tensor_cases import LENGTH, SAMPLES, STEPS, Case, batches, build, one_process
from torch import nn

import xds
from xds.tensor.sequence.batches import positions_of

pytest.importorskip("transformers", reason="pip install -e '.[test]'")
LLAMA = {
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.layers.*.input_layernorm": "sequence_parallel",
    "model.layers.*.post_attention_layernorm": "sequence_parallel",
}
GPT = {
    "blocks.*.attention_norm": "sequence_parallel",
    "blocks.*.mlp_norm": "sequence_parallel",
    "blocks.*.attention.qkv": "packed_colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}
GPT2 = {
    "transformer.h.*.ln_1": "sequence_parallel",
    "transformer.h.*.ln_2": "sequence_parallel",
    "transformer.h.*.attn.c_attn": "packed_colwise",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
}
QWEN3 = LLAMA | {
    f"model.layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"
}
PLANS = {"llama": LLAMA, "gpt2": GPT2, "qwen3": QWEN3}


def train(case: Case, more: dict[str, Any], plan: dict[str, str]) -> tuple[Any, set[int], int]:
    """Loss and norm of each step, the tokens that norms in blocks saw, and bytes of a step for tensor ranks."""
    config = case.config() | more
    config["tensor_parallel"] = {**config["tensor_parallel"], "plan": plan}
    engine = xds.initialize(build(case.model, case.sequence), config)
    seen: set[int] = set()

    def note(_: nn.Module, args: Any, __: Any) -> None:
        seen.add(args[0].shape[1])

    for name, module in engine.module.named_modules():
        if plan.get(".".join("*" if part.isdigit() else part for part in name.split("."))) == (
            "sequence_parallel"
        ):
            module.register_forward_hook(note)
    found, before = [], 0
    for step in range(STEPS):
        before = sum(v for kind, v in engine.bytes_sent().items() if kind.startswith("tensor"))
        loss = engine.train_batch(batches(case.model, step, engine.dp_rank))
        found.append((loss.item(), engine.get_global_grad_norm()))
    sent = sum(v for kind, v in engine.bytes_sent().items() if kind.startswith("tensor")) - before
    engine.destroy()
    return found, seen, sent


RECOMPUTED = {"activation_checkpointing": {"enabled": True}}


@pytest.mark.parametrize(
    ("case", "more"),
    [
        (Case("llama", 1, 1, 1, 2, 2), {}),
        (Case("gpt2", 1, 1, 1, 2, 3), RECOMPUTED),
        *(
            pytest.param(Case(*case), more, marks=pytest.mark.slow)
            for case, more in (
                (("qwen3", 1, 2, 1, 2, 1), {}),
                (("llama", 2, 1, 1, 2, 0), {}),
                (("llama", 1, 1, 2, 2, 3), RECOMPUTED),
                (("gpt2", 1, 1, 1, 4, 0), {}),
                (("llama", 2, 1, 1, 2, 1), {"pipeline": {"stages": 2, "schedule": "zero_bubble"}}),
            )
        ),
    ],
    ids=lambda one: one.name if isinstance(one, Case) else "",
)
def test_blocks_with_own_tokens_equal_one_process(case: Case, more: dict[str, Any]) -> None:
    for found, seen, _ in run_ranks(train, case.mesh.size, case, more, PLANS[case.model]):
        assert worst(found, one_process(case.model, case.data)) <= SAME
        own = LENGTH // case.sequence // case.tensor
        assert seen == ({own, LENGTH // case.tensor} if case.sequence > 1 else {own})  # the proof


def test_a_block_sends_as_many_bytes_as_with_whole_activations() -> None:
    case = Case("llama", 1, 1, 1, 2, 0)
    one = SAMPLES * LENGTH * 32 * 4  # activations of a micro-batch, fp32
    for _, _, sent in run_ranks(train, 2, case, {}, LLAMA):
        # of half of them: a gather and a sum in both passes, twice in each of 4 blocks; a cut and a join
        assert sent == 4 * (8 * 4 + 2) * one // 2


def refused(kind: str) -> str:
    case = Case("llama", 1, 1, 1, 2, 0)
    config = case.config() | {"gradient_accumulation_steps": 1}
    config["tensor_parallel"]["plan"] = LLAMA
    if kind == "partitions":
        config["activation_checkpointing"] = {"enabled": True, "partition_activations": True}
    if kind == "compiled":
        config["compile"] = {"enabled": True}
    if kind == "wrong":
        plan = {**LLAMA, "model.layers.*.self_attn.q_proj": "replicate"}
        config["tensor_parallel"]["plan"] = plan
    try:
        engine = xds.initialize(build("llama"), config)
        ids = torch.randint(3, 60, (2, 11 if kind == "odd" else 12))
        torch.distributed.broadcast(ids, 0)
        engine(input_ids=ids, labels=ids)
        engine.destroy()
    except xds.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("odd", "with 11 tokens, which 2 ranks cannot share evenly"),
        ("partitions", "it does not work with activation_checkpointing.partition_activations"),
        ("compiled", "it does not work with compile.enabled"),
    ],
)
def test_what_needs_whole_activations_is_refused(kind: str, part: str) -> None:
    assert all(part in said for said in run_ranks(refused, 2, kind))


def test_positions_count_tokens_and_mark_all_padding() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]])
    assert positions_of(mask).tolist() == [[-1, -1, 0, 1], [0, 1, -1, -1], [0, -1, 1, 2]]
