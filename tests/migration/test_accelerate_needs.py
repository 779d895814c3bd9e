"""What accelerate's DeepSpeed integration asks of `xds.deepspeed`, as its own tests check it."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from warm_ranks import warm

from xds import deepspeed
from xds.deepspeed.runtime.pipe.engine import PipelineEngine
from xds.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from xds.deepspeed.utils import groups, set_z3_leaf_modules, z3_leaf_module

KEY = "stage3_gather_16bit_weights_on_model_save"


def start(zero: Any = 2, model: nn.Module | None = None, **more: Any) -> Any:
    section = {"stage": zero} if isinstance(zero, int) else zero
    model = nn.Linear(4, 4) if model is None else model
    base = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={**base, "zero_optimization": section, **more},
    )
    return engine


def answers() -> dict[str, Any]:
    """What accelerate reads of engines, on one rank."""
    gathers = [
        start(section).zero_gather_16bit_weights_on_model_save()
        for section in ({"stage": 3, KEY: False}, {"stage": 3, KEY: True}, {"stage": 3})
    ]
    engine = start(2, fp16={"enabled": True, "initial_scale_power": 16})
    norms = [engine.get_global_grad_norm()]
    # the gradient of an fp16 loss is its scale, 65536, which is no fp16 number: the step is skipped
    engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).mean())
    engine.step()
    norms += [engine.get_global_grad_norm(), engine.optimizer._global_grad_norm]
    return {
        "gathers": gathers,
        "norms": norms,
        "overflow": engine.optimizer.overflow,
        "kind": type(engine) is deepspeed.DeepSpeedEngine,
    }


def test_what_accelerate_reads_of_an_engine() -> None:
    """Its get_state_dict raises where the key is false. Where the key is absent, weights are gathered."""
    (found,) = warm(1).run(answers)
    assert found["gathers"] == [False, True, True]
    assert found["norms"] == [None, math.inf, math.inf] and found["overflow"]
    assert found["kind"] and issubclass(PipelineEngine, deepspeed.DeepSpeedEngine)


def warnings_of_starts() -> list[str]:
    said: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("xds")
    logger.addHandler(handler)
    try:
        start({"stage": 3, "sub_group_size": 1e9, "offload_param": {"device": "none"}})
        start(3, optimizer=None)
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in said]


def test_a_common_config_and_a_reference_model_start_without_a_warning() -> None:
    """A key without effect is no warning here: almost each of DeepSpeed's configs has one."""
    assert warm(1).run(warnings_of_starts) == [[]]


def test_a_leaf_module_says_so_itself_and_so_does_its_copy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    set_z3_leaf_modules(model, [nn.Linear])
    for one in (model, copy.deepcopy(model)):
        assert one[0]._z3_leaf and z3_leaf_module(one[0]) and not z3_leaf_module(one[1])


def build() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config)


def logits_of_both_modes() -> tuple[float, float]:
    """The largest differences from the plain model: a cut batch in training, a whole one in evaluation."""
    mpu = UlyssesSPAttentionHF.register_with_transformers("x", "sdpa", 2, 1, disable_in_eval=True)
    plain, model = build(), build()
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, mpu=mpu
    )
    rank = groups._get_sequence_parallel_rank()
    ids = torch.arange(8).view(1, 8)
    own = slice(rank * 4, rank * 4 + 4)
    engine.train()
    cut = engine(input_ids=ids[:, own], position_ids=ids[:, own]).logits
    in_training = (cut - plain(ids).logits[:, own]).abs().max().item()
    engine.eval()
    mine = (ids + dist.get_rank()) % 32  # each rank has a batch of its own, without position_ids
    in_evaluation = (engine(input_ids=mine).logits - plain(mine).logits).abs().max().item()
    engine.destroy()
    return in_training, in_evaluation


def test_disable_in_eval_takes_whole_batches_of_each_rank_after_eval() -> None:
    """accelerate always passes it."""
    pytest.importorskip("transformers")
    for in_training, in_evaluation in warm(2).run(logits_of_both_modes):
        assert in_training < 1e-6 and in_evaluation < 1e-6
