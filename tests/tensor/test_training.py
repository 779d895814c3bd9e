"""Steps on tensor, sequence, pipeline and data ranks, and what joins them, equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import tensor_cases
import torch
from helpers import run_ranks
from pipeline_runs import SAME, worst
from tensor_cases import LENGTH, SAMPLES, STEPS, TOKENS, Case, batches, build, one_process
from torch import Tensor, nn

import xds

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

RECOMPUTED = {"activation_checkpointing": {"enabled": True}}
TILES = {"sequence": {"tiled_mlp": 5, "tiled_loss": 7}}
CUT_HEAD = {"vocab_parallel_lm_head": True}
GPT2 = {
    "transformer.h.*.ln_1": "sequence_parallel",
    "transformer.h.*.ln_2": "sequence_parallel",
    "transformer.h.*.attn.c_attn": "packed_colwise",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
}

# model, ranks of (pipe, data, sequence, tensor), ZeRO stage; keys of tensor_parallel; other sections
CASES: list[tuple[Case, dict[str, Any], dict[str, Any]]] = [
    (Case("llama", 1, 2, 1, 2, 3, "SGD"), {}, {}),
    (Case("qwen3", 1, 1, 1, 2, 2), {}, {}),  # norms of heads
    (Case("gpt2", 1, 1, 1, 2, 3), {"tp_overlap_comm": True}, RECOMPUTED),  # a plan that is found
    (Case("gpt2", 2, 1, 1, 2, 1, "SGD"), CUT_HEAD, {}),  # a weight that is cut and tied over stages
    (Case("llama", 1, 2, 1, 2, 1), CUT_HEAD, {}),
    (Case("gpt", 2, 1, 1, 2, 0, "SGD"), {}, {"pipeline": {"stages": 2, "schedule": "zero_bubble"}}),
    (Case("llama", 2, 1, 2, 1, 3), {}, {}),
    (Case("gpt", 1, 1, 2, 2, 2, "SGD"), {}, {}),
    (Case("llama", 1, 2, 1, 1, 3), {}, TILES),
    (Case("gpt2", 1, 1, 1, 2, 2, "SGD"), CUT_HEAD, TILES),
    (Case("llama", 1, 1, 1, 2, 1), {}, TILES),  # the head's logits would be gathered
    (Case("llama", 1, 1, 2, 1, 2), {}, TILES),
    (Case("llama", 1, 1, 1, 2, 2, "SGD"), {"plan": TOKENS}, {}),  # norms of a part of the tokens
    (Case("gpt2", 1, 1, 1, 2, 3), {"plan": GPT2, "tp_overlap_comm": True}, RECOMPUTED),
]


def train(
    case: Case, tensor: dict[str, Any], more: dict[str, Any]
) -> tuple[Any, Any, set[int], int]:
    """Loss and norm of each step, what tensor ranks have alike, tokens of norms, most logits of a module."""
    config = case.config() | more
    config["tensor_parallel"] |= tensor
    model = build(case.model, case.sequence, case.layers)
    engine = xds.initialize(model, config)
    tokens: set[int] = set()
    largest = 0

    def note(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal largest
        if getattr(module, "is_noted", False):
            tokens.add(args[0].shape[1])
        if isinstance(output, Tensor) and output.shape[-1:] == (tensor_cases.VOCAB,):
            largest = max(largest, output.numel())

    plan = tensor.get("plan", {})
    handles = []
    for name, module in engine.module.named_modules():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        module.is_noted = plan.get(pattern) == "sequence_parallel"  # type: ignore[assignment]
        handles.append(module.register_forward_hook(note))
    found = []
    for step in range(STEPS):
        loss = engine.train_batch(batches(case.model, step, engine.dp_rank))
        found.append((loss.item(), engine.get_global_grad_norm()))
    for handle in handles:
        handle.remove()
    if "sequence" in more:
        batch = next(batches(case.model, 0, 0))
        assert engine(**batch).logits is None
        if case.tensor > 1:
            batch.pop("labels")  # with labels each rank has its columns
        with torch.no_grad():
            assert engine(**batch).logits.shape[-1] == tensor_cases.VOCAB
    whole = engine.full_state_dict(rank0_only=False)
    same = {
        name: param.detach().clone()
        for name, param in engine.module.named_parameters()
        if name in whole and param.shape == whole[name].shape and case.stage < 3
    }
    engine.destroy()
    assert "forward" not in model.__dict__ and "_loss_function" not in model.__dict__
    return found, same, tokens, largest


SLOW = (1, 4, 9, 10, 11, 13)  # each differs in little from one of the others


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            at,
            id=f"{at}-{case.name}",
            marks=pytest.mark.slow if at in SLOW else (),
        )
        for at, (case, _, _) in enumerate(CASES)
    ],
)
@pytest.mark.quick(
    "12-llama-1x1x1x2-zero2", "2-gpt2-1x1x1x2-zero3", "8-llama-1x2x1x1-zero3", "7-gpt-1x1x2x2-zero2"
)
def test_steps_equal_those_of_one_process(number: int) -> None:
    case, tensor, more = CASES[number]
    ranks = run_ranks(train, case.mesh.size, *CASES[number])
    assert (
        worst(ranks[0][0], one_process(case.model, case.data, case.layers, case.optimizer)) <= SAME
    )
    for group in case.mesh.groups("tensor"):
        first, *others = (ranks[rank] for rank in group)
        for steps, params, _, _ in others:
            assert steps == first[0]
            assert all(torch.equal(param, first[1][name]) for name, param in params.items())
    for _, _, tokens, largest in ranks:
        if "plan" in tensor:
            assert tokens == {LENGTH // case.tensor}
        if "sequence" in more:
            assert largest == 0 or case.sequence > 1  # the proof of sequences computes a few


def sent(plan: dict[str, str]) -> int:
    """Bytes that this rank sends to tensor ranks in the second step."""
    config = Case("llama", 1, 1, 1, 2, 0).config()
    config["tensor_parallel"]["plan"] = plan
    engine = xds.initialize(build("llama"), config)
    seen = []
    for step in range(2):  # the first has the proof
        engine.train_batch(batches("llama", step, 0))
        bytes_sent = engine.bytes_sent().items()
        seen.append(sum(size for kind, size in bytes_sent if kind.startswith("tensor")))
    engine.destroy()
    return seen[1] - seen[0]


def test_a_block_with_own_tokens_sends_as_many_bytes_as_with_whole_activations() -> None:
    one = SAMPLES * LENGTH * 32 * 4  # activations of a micro-batch, fp32
    # of half of them: a gather and a sum in both passes, twice in each of 4 blocks; a cut and a join
    assert run_ranks(sent, 2, TOKENS) == [4 * (8 * 4 + 2) * one // 2] * 2


# -- what is refused ----------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (
        "llama",
        {"tensor_parallel": {"tp_size": 2, "plan": TOKENS}},
        11,
        "with 11 tokens, which 2 ranks",
    ),
    (
        "llama",
        {
            "tensor_parallel": {"tp_size": 2, "plan": TOKENS},
            "activation_checkpointing": {"enabled": True, "partition_activations": True},
        },
        12,
        "it does not work with activation_checkpointing.partition_activations",
    ),
    (
        "llama",
        {"tensor_parallel": {"tp_size": 2, "plan": TOKENS}, "compile": {"enabled": True}},
        12,
        "it does not work with compile.enabled",
    ),
    ("gpt", {"sequence": {"tiled_mlp": 4}}, 12, "has no module called mlp or feed_forward or ffn"),
    ("gpt", {"sequence": {"tiled_loss": 4}}, 12, "no causal language model"),
    (
        "llama",
        {"sequence": {"tiled_mlp": 4, "tiled_modules": ["fc"]}},
        12,
        "no module called fc",
    ),
    (
        "llama",
        {
            "sequence": {"tiled_loss": 4},
            "tensor_parallel": {"tp_size": 2, "plan": {"lm_head": "rowwise_split_input"}},
        },
        12,
        "cut the head by rows",
    ),
    (
        "gemma2",  # the last stage alone computes logits
        {"sequence": {"tiled_loss": 4}, "pipeline": {"stages": 2, "schedule": "gpipe"}},
        12,
        "changes its logits between head and loss",
    ),
]


def refused(name: str, changes: dict[str, Any], length: int) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    if name == "gemma2":
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        more = {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 66}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **more))
    else:
        model = build(name)
    config = Case("llama", 1, 1, 1, 1, 0).config() | {"gradient_accumulation_steps": 1} | changes
    ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(1))
    with pytest.raises(xds.UsageError) as caught:
        engine = xds.initialize(model, config)
        engine(input_ids=ids, labels=ids)
    return str(caught.value)


def test_what_cannot_be_cut_in_tiles_or_tokens_is_refused_on_every_rank() -> None:
    for name, changes, length, text in REFUSED:
        ranks = changes.get("tensor_parallel", {}).get("tp_size", 1)
        ranks *= changes.get("pipeline", {}).get("stages", 1)
        for said in run_ranks(refused, ranks, name, changes, length):
            assert text in said, said


def with_adapters(tiles: dict[str, Any], stages: int) -> list[float]:
    """Losses of a model in peft's wrapper."""
    import peft

    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules="all-linear")
    model = peft.get_peft_model(build("llama"), lora)
    config = Case("llama", stages, 1, 1, 1, 1).config()
    engine = xds.initialize(model, config | ({"sequence": tiles} if tiles else {}))
    losses = [engine.train_batch(batches("llama", step, 0)).item() for step in range(2)]
    engine.destroy()
    return losses


def test_the_loss_of_a_model_with_adapters_runs_in_tiles() -> None:
    pytest.importorskip("peft", reason="pip install peft")
    wanted = run_ranks(with_adapters, 1, {}, 1)[0]
    for found in run_ranks(with_adapters, 2, {"tiled_loss": 5}, 2):
        assert found == pytest.approx(wanted, rel=SAME)
