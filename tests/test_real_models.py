"""Tests with real `transformers` models, random and tiny, at every stage: five steps equal plain PyTorch's.

fp32: losses and gradient norms within 5e-6 relative of one process with the whole batch; stages 0 to 3
bit-equal. bf16: within 2e-3 of one process that keeps bf16 parameters and fp32 masters and takes the ranks'
parts in turn, losses within 2 % of fp32's; stages 1 to 3 bit-equal.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers import run_new_ranks
from real_models import NAMES, batch, build, part_of
from real_runs import (
    EVERY_CASE,
    FP32_ENDS,
    SAMPLES,
    WORLD_SIZE,
    Plan,
    check_bf16,
    check_fp32,
    engine_runs,
    plain_run,
)
from torch import Tensor
from torch.nn import functional as F

from xds.zero.core.discover import find_units

pytest.importorskip("transformers", reason="pip install -e '.[test]'")
pytest.importorskip("peft", reason="pip install -e '.[test]'")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

# as users run it: blocks merged into units of two million elements, small ones kept gathered
DEFAULTS = {"unit_min_numel": 2_097_152, "stage3_param_persistence_threshold": 100_000}
NOTHING_KEPT = {"stage3_max_reuse_distance": 0}
BLOCKS = {
    "gpt2": ["transformer.h.0", "transformer.h.1", "transformer.h.2"],
    "llama": ["model.layers.0", "model.layers.1", "model.layers.2"],
    "mixtral": ["model.layers.0", "model.layers.1", "model.layers.2"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "vit": ["vit.layers.0", "vit.layers.1", "vit.layers.2"],
    "whisper": [
        "model.encoder.layers.0",
        "model.encoder.layers.1",
        "model.decoder.layers.0",
        "model.decoder.layers.1",
    ],
}


def cached_and_tuple(model: Any, inputs: Any) -> Tensor:
    """A tuple instead of a dataclass, with the key-value cache and all hidden states in it."""
    outputs = model(**inputs, use_cache=True, output_hidden_states=True, return_dict=False)
    loss: Tensor = outputs[0]
    return loss


def head_outside(model: Any, inputs: Any) -> Tensor:
    """The head's weight is read by a function, not by its module; the trunk is called on its own."""
    inner = getattr(model, "module", model)
    hidden = inner.base_model(inputs["input_ids"]).last_hidden_state
    logits = F.linear(hidden[:, :-1], inner.lm_head.weight)
    return F.cross_entropy(logits.flatten(0, 1).float(), inputs["labels"][:, 1:].flatten())


def encoder_apart(model: Any, inputs: Any) -> Tensor:
    """The encoder is called on its own, and its outputs are fed to the model twice."""
    inner = getattr(model, "module", model)
    name = "input_ids" if "input_ids" in inputs else "input_features"
    encoded = inner.get_encoder()(inputs[name])
    labels = inputs["labels"]
    first: Tensor = model(encoder_outputs=encoded, labels=labels).loss
    second: Tensor = model(encoder_outputs=encoded, labels=labels.flip(1)).loss
    return (first + second) / 2


def evaluated_before(model: Any, inputs: Any) -> Tensor:
    """A pass without gradients before each step."""
    with torch.no_grad():
        model(**inputs)
    loss: Tensor = model(**inputs).loss
    return loss


def with_router_loss(model: Any, inputs: Any) -> Tensor:
    loss: Tensor = model(**inputs, output_router_logits=True).loss
    return loss


# a block that will be recomputed gets no cache; T5 adds up in another order with one
NO_CACHE = {"use_cache": False}
RECOMPUTED = {"activation_checkpointing": {}}
FULL, ENDS = EVERY_CASE, FP32_ENDS
# gpt2 runs by default; each of the others runs what only its layers have with `pytest -m slow`
VARIANTS: dict[str, dict[str, Plan]] = {
    "gpt2": {
        "plain": Plan("gpt2", cases=FULL),
        "lora": Plan("gpt2", "lora", cases=FULL),
        "lora_saved": Plan("gpt2", "lora_saved", cases=ENDS),
        "recomputed_reentrant": Plan("gpt2", "recomputed_reentrant", cases=ENDS),
        "recomputed_by_config": Plan("gpt2", config=RECOMPUTED, plain_inputs=NO_CACHE, cases=ENDS),
        "default_units": Plan("gpt2", zero=DEFAULTS, cases=ENDS),
        "evaluated_before": Plan("gpt2", loss=evaluated_before, zero=NOTHING_KEPT, cases=ENDS),
        "cached_and_tuple": Plan("gpt2", loss=cached_and_tuple, cases=ENDS),
        "head_outside": Plan("gpt2", loss=head_outside, zero=NOTHING_KEPT, cases=ENDS),
    },
    "llama": {
        "plain": Plan("llama", cases=FULL),
        "recomputed": Plan("llama", "recomputed", cases=ENDS),
        "lora_recomputed_reentrant": Plan("llama", "lora_recomputed_reentrant", cases=ENDS),
    },
    "mixtral": {
        "plain": Plan("mixtral", cases=FULL),
        "lora_experts": Plan("mixtral", "lora_experts", cases=ENDS),
        "router_loss": Plan("mixtral", loss=with_router_loss, by_parts=True, cases=ENDS),
    },
    "t5": {
        "plain": Plan("t5", cases=ENDS),
        "encoder_apart": Plan("t5", loss=encoder_apart, zero=NOTHING_KEPT, cases=ENDS),
        "cached_and_tuple": Plan("t5", loss=cached_and_tuple, cases=ENDS),
    },
    "vit": {"plain": Plan("vit", cases=ENDS), "lora": Plan("vit", "lora", cases=ENDS)},
    "whisper": {
        "plain": Plan("whisper", cases=ENDS),
        "encoder_apart": Plan("whisper", loss=encoder_apart, zero=NOTHING_KEPT, cases=ENDS),
    },
}


@cache
def _runs_or_error(name: str) -> dict[str, dict[tuple[int, str], Any]] | AssertionError:
    try:
        first, second = run_new_ranks(engine_runs, WORLD_SIZE, list(VARIANTS[name].values()))
    except AssertionError as error:  # kept as well: it took as long
        return error
    for one, two in zip(first, second, strict=True):
        for case in one:
            assert one[case]["losses"] == two[case]["losses"]
            assert one[case]["norms"] == two[case]["norms"]
    return dict(zip(VARIANTS[name], first, strict=True))


def runs_of(name: str) -> dict[str, dict[tuple[int, str], Any]]:
    """Rank 0's results of every variant; every rank has the same."""
    runs = _runs_or_error(name)
    if isinstance(runs, AssertionError):
        raise runs
    return runs


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(name, variant, marks=() if name == "gpt2" else pytest.mark.slow)
        for name in NAMES
        for variant in VARIANTS[name]
    ],
)
def test_five_steps_equal_plain_pytorch(name: str, variant: str) -> None:
    plan = VARIANTS[name][variant]
    runs = runs_of(name)[variant]
    fp32 = plain_run(plan, "fp32")
    check_fp32(runs, fp32)
    if (0, "bf16") in runs:
        check_bf16(runs, plan, fp32)


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_is_a_layer_and_the_root_holds_the_rest(name: str) -> None:
    model = build(name)
    units, root = find_units(model)
    assert [unit.name for unit in units] == BLOCKS[name]
    assert all(len(unit.modules) == 1 for unit in units)
    outside = {id(param) for _, param in root.params}
    assert id(model.get_input_embeddings().weight) in outside if name != "vit" else outside


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5"])
def test_lora_keeps_the_units_of_its_base(name: str) -> None:
    units, _ = find_units(build(name, "lora"))
    assert [unit.name for unit in units] == [f"base_model.model.{block}" for block in BLOCKS[name]]


@pytest.mark.slow
def test_the_ranks_of_the_mixtral_runs_use_different_experts_and_leave_some_unused() -> None:
    model = build("mixtral")
    used = []
    for rank in range(WORLD_SIZE):
        model.zero_grad()
        model(**part_of(batch("mixtral", 0, SAMPLES), rank, WORLD_SIZE)).loss.backward()
        grads = model.model.layers[0].mlp.experts.down_proj.grad
        used.append({number for number, grad in enumerate(grads) if grad.any()})
    assert used[0] != used[1]
    assert len(used[0] | used[1]) < model.config.num_local_experts
