"""Tests of parts of `xds.deepspeed.runtime` beside the engine: losses, batches, schedules, rollouts."""

from __future__ import annotations

import logging
import types
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from pydantic import ValidationError
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import xds.deepspeed as deepspeed
from xds.deepspeed.runtime import chunked_cross_entropy as chunked
from xds.deepspeed.runtime import config as configs
from xds.deepspeed.runtime.activation_checkpointing.offload_activations import (
    CheckpointHiddenStatesOffload,
)
from xds.deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from xds.deepspeed.runtime.data_pipeline.data_sampling import variable_batch_size_and_lr as batches
from xds.deepspeed.runtime.engine import DeepSpeedEngine
from xds.deepspeed.runtime.pipe import schedule
from xds.deepspeed.runtime.pipe.engine import PipelineEngine
from xds.deepspeed.runtime.rollout import ResponseTokenBatch, RolloutBatch, generalized_jsd_loss
from xds.deepspeed.runtime.rollout.continuous_batching import (
    ContinuousBatchRequest,
    ContinuousBatchScheduler,
)
from xds.deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan
from xds.deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from xds.deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from xds.deepspeed.utils import groups
from xds.deepspeed.utils.logging import logger, set_log_level_from_string

# -- the loss in blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, 1, 5, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_in_blocks_is_cross_entropy(rows: int | None, reduction: str) -> None:
    logits = torch.randn(13, 21) * 5
    target = torch.randint(0, 21, (13,))
    target[3] = -100
    found = []
    for function in (cross_entropy, chunked.chunked_cross_entropy):
        leaf = logits.clone().requires_grad_()
        options: dict[str, Any] = {} if function is cross_entropy else {"block_rows": rows}
        loss = function(leaf, target, reduction=reduction, **options)
        (loss * torch.arange(1.0, 14.0) if loss.dim() else loss).sum().backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(found[1], found[0])


def test_the_loss_in_blocks_keeps_one_number_per_row() -> None:
    kept: list[torch.Tensor] = []
    logits = torch.randn(32, 500, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: kept.append(one) or one, lambda one: one
    ):
        loss = chunked.chunked_cross_entropy(
            logits, torch.zeros(32, dtype=torch.long), block_rows=8
        )
    assert max(one.numel() for one in kept if one.dtype == torch.float32) == 32
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_a_wrong_target_is_an_error_and_no_other_row() -> None:
    for wrong in (4, -1):
        with pytest.raises(RuntimeError, match="out of range"):
            chunked.chunked_cross_entropy(torch.zeros(2, 4), torch.tensor([0, wrong]))
    with pytest.raises(ValueError, match="ForCausalLMLoss"):
        chunked.install_chunked_causal_lm_loss(nn.Linear(1, 1))


# -- batches of about equal tokens --------------------------------------------------------------------------


def test_samples_are_packed_up_to_the_limit_in_order() -> None:
    lengths = [3, 7, 2, 8, 5, 5, 1, 9, 13]
    found, counts, longest = batches.batch_by_seqlens(lengths, max_tokens=12)
    assert [numbers for _, numbers in found] == [[0, 1, 2], [3], [4, 5, 6], [7]]
    assert (counts, longest) == ([3, 1, 3, 1], [7, 8, 5, 9])


def test_micro_batches_of_a_step_have_as_many_samples() -> None:
    found, counts, _ = batches.batch_by_seqlens(
        [5] * 11, 10, effective_batch_size=2, required_microbatches_of_same_size=True
    )
    assert [len(numbers) for _, numbers in found] == [2, 2, 2, 2, 1, 1]
    assert (counts, [step for step, _ in found]) == ([4, 4, 2], [0, 0, 1, 1, 2, 2])
    with pytest.raises(AssertionError, match="give more samples"):
        batches.batch_by_seqlens([5], 10, effective_batch_size=2)


def test_an_lr_is_scaled_to_a_batch_size() -> None:
    assert batches.scale_lr(4, 16, 1.0) == 4 and batches.scale_lr(4, 16, 1.0, "sqrt") == 2
    assert batches.scale_lr(4, 16, 0.5, None) == 0.5


# -- DualPipeV ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 4), (3, 8), (4, 13)])
@pytest.mark.parametrize("forward_only", [True, False])
def test_each_message_of_dualpipev_is_sent_and_received_in_one_order(
    ranks: int, micro_batches: int, forward_only: bool
) -> None:
    sent: dict[Any, list[int]] = {}
    received: dict[Any, list[int]] = {}
    for rank in range(ranks):
        made = schedule.DualPipeVSchedule(micro_batches, ranks, rank, forward_only=forward_only)
        commands = [one for step in made for one in step]
        counts = Counter(type(one) for one in commands)
        assert counts[schedule.ForwardPass] == 2 * micro_batches
        assert counts[schedule.BackwardPass] == (0 if forward_only else 2 * micro_batches)
        assert counts[schedule.LoadMicroBatch] == (micro_batches if rank == 0 else 0)
        assert all(
            one.buffer_id < made.num_pipe_buffers() for one in commands if hasattr(one, "phase")
        )
        for one in commands:
            into = (
                sent if isinstance(one, (schedule.SendActivation, schedule.SendGrad)) else received
            )
            if isinstance(one, (schedule.SendActivation, schedule.RecvActivation)):
                _note(into, "F", rank, one, micro_batches, is_up=False)
            elif isinstance(one, (schedule.SendGrad, schedule.RecvGrad)):
                _note(into, "B", rank, one, micro_batches, is_up=True)
    assert sent == received


def _note(
    into: dict[Any, list[int]], kind: str, rank: int, one: Any, count: int, is_up: bool
) -> None:
    """By the rank nearer to the start of the V's arm, so that both ends of a message have one key."""
    ahead = (one.phase == 0) != is_up  # the message goes to a higher rank
    is_sent = type(one).__name__.startswith("Send")
    sender = rank if is_sent else rank - (1 if ahead else -1)
    into.setdefault((kind, one.phase, sender), []).append(one.buffer_id % count)


def test_dualpipev_needs_two_micro_batches_a_rank() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        schedule.DualPipeVSchedule(3, 2, 0)


# -- rollouts -----------------------------------------------------------------------------------------------


def test_targets_of_a_response_and_the_loss_against_a_teacher() -> None:
    ids = torch.tensor([[7, 8, 9, 2], [5, 6, 3, 0]])
    batch = RolloutBatch(ids, (ids != 0).long(), torch.tensor([2, 2]))
    found = ResponseTokenBatch.from_rollout(batch)
    assert found.response_mask.tolist() == [[False, True, True], [False, True, False]]
    student, teacher = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    for beta in (0.0, 1.0):
        one, other = (teacher, student) if beta == 0 else (student, teacher)
        kl = (one.softmax(-1) * (one.log_softmax(-1) - other.log_softmax(-1))).sum(-1)
        loss = generalized_jsd_loss(student, teacher, found.response_mask, beta=beta)
        torch.testing.assert_close(loss.loss, kl[found.response_mask].mean())
    half = generalized_jsd_loss(student, teacher, found.response_mask)
    swapped = generalized_jsd_loss(teacher, student, found.response_mask)
    torch.testing.assert_close(half.loss, swapped.loss)


def test_requests_take_rows_as_they_become_free() -> None:
    scheduler = ContinuousBatchScheduler(max_batch_size=2, max_new_tokens=2)
    for name in "abcd":
        scheduler.submit(ContinuousBatchRequest(name))
    assert scheduler.schedule().active_ids == ("a", "b")
    change = scheduler.advance(finished_ids=["a"])
    assert (change.keep_slots, change.active_ids, change.admitted_slots) == ((1,), ("b", "c"), (1,))
    change = scheduler.advance()  # b has two tokens now
    assert (change.retired, change.active_ids) == (("b",), ("c", "d"))
    with pytest.raises(ValueError, match="not active"):
        scheduler.advance(["a"])


# -- configs ------------------------------------------------------------------------------------------------


def test_a_plan_for_tensor_ranks_is_put_together() -> None:
    config = types.SimpleNamespace(base_model_tp_plan={"layers.*.q": "colwise"})
    own = {"model.layers.*.q": "colwise", "lm_head": "rowwise"}
    model = types.SimpleNamespace(config=config, _tp_plan=own)
    assert _get_hf_tp_plan(model) == {"layers.*.q": "colwise", "lm_head": "rowwise"}
    assert _get_hf_tp_plan(nn.Linear(1, 1)) is None


def test_an_engine_that_was_not_made_keeps_what_a_script_sets() -> None:
    engine = PipelineEngine.__new__(PipelineEngine)
    engine.stage_id = 4
    assert engine.get_pipeline_parallel_rank() == 4


def test_functions_that_read_a_config() -> None:
    assert configs.get_gradient_clipping({}) == 1.0 and configs.get_log_level({}) is None
    assert configs.get_optimizer_params({"optimizer": {"params": {"lr": 1}}}) == {"lr": 1}
    assert deepspeed.__git_hash__ == deepspeed.git_hash


def test_dtypes_are_checked_and_cast_without_an_engine() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.zeros(2, dtype=torch.float8_e4m3fn))
    stub = types.SimpleNamespace(
        module=module,
        fp16_enabled=lambda: False,
        bfloat16_enabled=lambda: True,
        _config=types.SimpleNamespace(
            param_dtype="fp16", buffer_dtype="bf16", gradient_clipping=0.5
        ),
    )
    assert DeepSpeedEngine._mixed_precision_dtypes(stub) == (torch.bfloat16, torch.bfloat16)
    assert DeepSpeedEngine.gradient_clipping(stub) == 0.5
    with pytest.raises(AssertionError, match="param_dtype = 'fp16'"):
        DeepSpeedEngine._assert_valid_mixed_precision_config(stub)
    DeepSpeedEngine._cast_module_mixed_precision(stub, torch.bfloat16, torch.bfloat16, False)
    assert (module.weight.dtype, module.scale.dtype) == (torch.bfloat16, torch.float8_e4m3fn)


# -- collectives --------------------------------------------------------------------------------------------


def _reduced_and_grouped() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [
        torch.arange(6.0).view(2, 3) * (rank + 1),
        torch.full((3,), float(rank)),
        torch.ones(1),
    ]
    parts = reduce_scatter_coalesced(tensors)
    groups._create_expert_and_data_parallel(2)
    name = "ep_size_2"
    sizes = (
        groups._get_expert_parallel_world_size(name),
        groups._get_expert_data_parallel_world_size(name),
    )
    model = nn.Linear(2, 2)
    narrow = torch.full((2, 2), float(rank), dtype=torch.float8_e4m3fn)
    model.frozen = nn.Parameter(narrow, requires_grad=False)
    model.register_buffer("scale", torch.ones(2, dtype=torch.float8_e5m2))
    model.register_buffer("inv_freq", torch.ones(2))
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_batch_size": 8,
            "log_level": "ERROR",
            "bf16": {"enabled": True},
            "data_types": {"buffer_dtype": "bf16"},
            "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        },
    )
    assert engine._config.train_micro_batch_size_per_gpu == 8 // size
    assert (engine.gradient_clipping(), engine.log_level()) == (1.0, "ERROR")
    assert (model.weight.dtype, model.scale.dtype) == (torch.bfloat16, torch.float8_e5m2)
    assert model.inv_freq.dtype == torch.bfloat16
    assert model.frozen.dtype == torch.float8_e4m3fn and not model.frozen.float().any()
    assert logger.level == logging.ERROR
    set_log_level_from_string("info")  # the next tests of these processes listen to it
    return [[one.tolist() for one in parts], sizes]


def test_parts_of_means_and_groups_of_experts() -> None:
    found = run_ranks(_reduced_and_grouped, 2)
    assert found[0] == [[[0.0, 1.5, 3.0], [0.5, 0.5], [1.0]], (2, 1)]
    assert found[1] == [[[4.5, 6.0, 7.5], [0.5], []], (2, 1)]


# -- inputs of recomputed layers on the host ------------------------------------------------------------------


def test_layers_mark_their_input_while_a_context_is_open() -> None:
    transformers = pytest.importorskip("transformers")
    kind = transformers.GradientCheckpointingLayer
    before = kind.__call__

    class Layer(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states.sin()

    layer = Layer().train()
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    given = torch.randn(4, requires_grad=True)
    outer, inner = CheckpointHiddenStatesOffload(), CheckpointHiddenStatesOffload()
    with outer, inner:
        layer(given).sum().backward()
        with pytest.raises(RuntimeError, match="not re-entrant"):
            outer.__enter__()
    torch.testing.assert_close(given.grad, given.detach().cos())
    found = inner.stats
    # nothing moves on a CPU
    assert (found.marked_tensors, found.skipped_marked_tensors, found.offloaded_tensors) == (
        1,
        1,
        0,
    )
    assert outer.stats.marked_tensors == 0
    layer(given)
    assert kind.__call__ is before and found.marked_tensors == 1


def test_the_section_zenflow_can_be_read() -> None:
    found = DeepSpeedZeroConfig(stage=2, zenflow={"topk_ratio": 0.25, "update_interval": 4}).zenflow
    assert isinstance(found, ZenFlowConfig) and (found.topk_ratio, found.offload) == (0.25, False)
    for wrong in ({"topk_ratio": 1.0}, {"update_interval": 0}, {"select_strategy": "never"}):
        with pytest.raises(ValidationError):
            ZenFlowConfig(**wrong)
