"""Compressed training: the same at every stage, resumed, in other features, and cleaned."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import build, micro_batch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import xds
from xds.compression.training.layers import CompressedLayer
from xds.compression.training.prepare import compressed_layers
from xds.engine.config.config import parse_config
from xds.engine.model.compressed_training import prepare


def technique(modules=("*",), related=None, shared=None, **params):
    group = {"modules": list(modules), "params": params}
    if related is not None:
        group["related_modules"] = related
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": 0, **(shared or {})},
        "different_groups": {"one": group},
    }


IN_FORWARD = {"quantize_weight_in_forward": True}
ALL = {
    "weight_quantization": technique(
        shared={**IN_FORWARD, "schedule_offset": 1}, start_bits=4, target_bits=4
    ),
    "activation_quantization": technique(["blocks"], shared={"schedule_offset": 2}, bits=8),
    "sparse_pruning": technique(["up"], shared={"schedule_offset": 1}, dense_ratio=0.5),
    "row_pruning": technique(
        ["up"], [["down"]], {"schedule_offset": 2, "method": "topk"}, dense_ratio=0.5
    ),
    "head_pruning": technique(["down"], shared={"num_heads": 6}, dense_ratio=0.5),
}
MOQ = {
    "weight_quantization": technique(
        shared={
            "quantize_groups": 8,
            "rounding": "stochastic",
            "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.25},
        },
        start_bits=6,
        target_bits=4,
        quantization_period=2,
    )
}


def config_of(section, stage=0, samples=4, **more):
    return {
        "train_micro_batch_size_per_gpu": samples,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "compression_training": section,
        **more,
    }


def train(engine, first, last, samples=4, accumulation=1):
    """The losses of the steps; each rank has its part of the samples."""
    found, mesh = [], engine.internals.rank_mesh
    for step in range(first, last):
        for micro in range(accumulation):
            batch = micro_batch(step, micro, samples * mesh.data)
            place = engine.dp_rank * samples
            loss = engine(batch[place : place + samples])
            engine.backward(loss)
            engine.step()
        found.append(engine.mean_loss())
    return found


def losses(section, stage, samples, more, steps=5):
    engine = xds.initialize(build("plain"), config_of(section, stage, samples, **more))
    found = train(engine, 0, steps, samples, engine.gradient_accumulation_steps())
    return found, engine.full_state_dict(rank0_only=False, full_precision=True)


def same(one, other):
    return one[0] == other[0] and all(torch.equal(one[1][k], other[1][k]) for k in one[1])


@pytest.mark.parametrize("section", [ALL, MOQ], ids=["all", "moq"])
def test_stages_have_the_same_bits_and_ranks_the_values_of_one_process(section):
    alone = run_ranks(losses, 1, section, 0, 4, {})[0]
    assert len(set(alone[0])) == 5
    for stage in (1, 3):
        assert same(run_ranks(losses, 1, section, stage, 4, {})[0], alone), stage
    two = run_ranks(losses, 2, section, 0, 2, {})
    assert torch.tensor(two[0][0]).sub(torch.tensor(alone[0])).abs().max() < 1e-5
    for stage in (2, 3):
        ranks = run_ranks(losses, 2, section, stage, 2, {})
        assert same(ranks[0], two[0]) and same(ranks[0], ranks[1]), stage


FEATURES = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "accumulation": {"gradient_accumulation_steps": 2},
    "recomputed": {"activation_checkpointing": {"enabled": True}},
    "offloaded": {},
}
AOT = {"compile": {"enabled": True, "backend": "aot_eager"}}


@pytest.mark.parametrize("feature", [*FEATURES, pytest.param("aot", marks=pytest.mark.slow)])
def test_features_train_at_stage_3_as_at_stage_0(feature):
    more = AOT if feature == "aot" else FEATURES[feature]
    at_3 = dict(more)
    if feature == "offloaded":
        offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
        at_3 = {"zero_optimization": {**offload, "offload_param": {"device": "cpu"}}}
    plain = {} if feature in ("recomputed", "aot", "offloaded") else more
    one = run_ranks(losses, 1, ALL, 0, 4, plain)[0]
    other = run_ranks(losses, 2, ALL, 3, 2, at_3)
    assert torch.tensor(one[0]).sub(torch.tensor(other[0][0])).abs().max() < (
        1e-4 if "16" not in feature and feature != "autocast" else 3e-2
    )


def test_names_of_parameters_stay_and_masks_are_buffers():
    model = build("plain")
    before = dict(model.named_parameters())
    xds.compression.init_compression(model, config_of(ALL))
    after = dict(model.named_parameters())
    assert before.keys() <= after.keys() and all(after[name] is before[name] for name in before)
    assert {name.rpartition(".")[2] for name in after.keys() - before.keys()} == {
        "row_mask_scores",
        "head_pruning_scores",
    }
    assert sum(name.endswith("sparse_pruning_mask") for name, _ in model.named_buffers()) == 3
    assert isinstance(model.blocks[0].up, nn.Linear) and not isinstance(model.norm, CompressedLayer)


# -- resume -------------------------------------------------------------------------------------------------


def begun(folder, section, stage, more):
    engine = xds.initialize(build("plain"), config_of(section, stage, 2, **more))
    train(engine, 0, 3, 2)
    engine.save_checkpoint(folder)
    return train(engine, 3, 7, 2), engine.full_state_dict(rank0_only=False, full_precision=True)


def resumed(folder, section, stage, more):
    engine = xds.initialize(build("plain"), config_of(section, stage, 2, **more))
    train(engine, 10, 11, 2)  # a mask of other weights, which the load replaces
    engine.load_checkpoint(folder)
    return train(engine, 3, 7, 2), engine.full_state_dict(rank0_only=False, full_precision=True)


@pytest.mark.parametrize("section", [ALL, MOQ], ids=["all", "moq"])
def test_a_resume_in_the_middle_of_a_schedule_has_the_same_bits(tmp_path, section):
    section = copy.deepcopy(section)
    if section.keys() == ALL.keys():  # one mask before the save, one after it
        section["row_pruning"]["shared_parameters"] |= {"method": "l1", "schedule_offset": 5}
    kept = run_ranks(begun, 2, str(tmp_path), section, 2, {})[0]
    for stage in (0, 3):
        assert same(run_ranks(resumed, 2, str(tmp_path), section, stage, {})[0], kept), stage
    alone = run_ranks(resumed_alone, 1, str(tmp_path), section)[0]
    assert torch.tensor(alone).sub(torch.tensor(kept[0])).abs().max() < 1e-4


def resumed_alone(folder, section):
    engine = xds.initialize(build("plain"), config_of(section, 0, 4))
    engine.load_checkpoint(folder)
    return train(engine, 3, 7, 4)


def skipping(scale):
    section = {"sparse_pruning": technique(["up"], shared={"schedule_offset": 1}, dense_ratio=0.5)}
    more = {"fp16": {"enabled": True, "initial_scale_power": scale, "hysteresis": 1}}
    engine = xds.initialize(build("plain"), config_of(section, 1, 2, **more))
    states = []
    for step in range(16):
        loss = engine(micro_batch(step, 0, 2))
        engine.backward(loss)
        engine.step()
        applied = engine.global_steps - engine.skipped_steps
        mask = engine.module.blocks[0].up.sparse_pruning_mask
        states.append((applied, bool(mask.all())))
    return states


def test_skipped_steps_do_not_count_and_masks_begin_at_the_offset():
    states = run_ranks(skipping, 2, 26)[0]
    assert states[0] == (0, True) and states[-1][0] > 0
    assert all(is_whole == (applied < 1) for applied, is_whole in states)


# -- the masks ----------------------------------------------------------------------------------------------


def first_masks(at_init):
    shared = {"schedule_offset": 2, "mask_at_init": at_init}
    section = {"sparse_pruning": technique(["up"], shared=shared, dense_ratio=0.25)}
    model = build("plain")
    before = model.blocks[0].up.weight.detach().clone()
    engine = xds.initialize(model, config_of(section, 3, 2))
    train(engine, 0, 2, 2)
    after = xds.zero.get_full_param(model.blocks[0].up.weight)
    return before, after, model.blocks[0].up.sparse_pruning_mask.clone()


def test_l1_masks_are_of_the_weights_at_the_offset_or_of_the_first_ones():
    for at_init in (False, True):
        before, after, mask = run_ranks(first_masks, 2, at_init)[0]
        weight = (before if at_init else after).abs()
        assert mask.sum() == mask.numel() // 4
        assert weight[mask].min() >= weight[~mask].max()


# -- pipelines and teachers ---------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth))
        )

    def forward(self, x):
        return (self.layers(x) - x).square().mean()


def piped(stages):
    torch.manual_seed(0)
    section = {
        "weight_quantization": technique(
            shared=IN_FORWARD, start_bits=4, target_bits=4, modules=["0"]
        )
        | {
            "different_groups": {
                "a": {"modules": [r"\.0$"], "params": {"start_bits": 4, "target_bits": 4}}
            }
        },
        "sparse_pruning": technique([r"3\.0"], shared={"schedule_offset": 1}, dense_ratio=0.5),
    }
    more = {"pipeline": {"stages": stages}} if stages > 1 else {}
    engine = xds.initialize(
        Layers(), config_of(section, 1, 4, gradient_accumulation_steps=2, **more)
    )
    found = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        batches = iter([torch.randn(4, 8, generator=generator) for _ in range(2)])
        found.append(engine.train_batch(batches).item())
    return found


def test_pipelines_compress_whole_models_and_refuse_parts():
    one, two = run_ranks(piped, 1, 1)[0], run_ranks(piped, 2, 2)[0]
    assert torch.tensor(one).sub(torch.tensor(two)).abs().max() < 1e-6
    with pytest.raises(xds.ConfigError, match="tensor_parallel.tp_size = 2: must be 1 with weight"):
        xds.Config.load(
            config_of(
                {"weight_quantization": ALL["weight_quantization"]}, tensor_parallel={"tp_size": 2}
            )
        )


def distilled(stage):
    torch.manual_seed(3)
    teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
    frozen = xds.initialize(
        teacher.requires_grad_(False),
        {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}},
    )
    student = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    section = {"weight_quantization": technique(shared=IN_FORWARD, start_bits=8, target_bits=8)}
    engine = xds.initialize(student, config_of(section, stage, 4))
    found = []
    for step in range(20):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step % 3))
        with torch.no_grad():
            told = frozen(x)
        loss = xds.compression.distillation_loss(engine(x), told, temperature=2.0)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def test_a_frozen_teacher_at_stage_3_stands_beside_the_student():
    found = run_ranks(distilled, 2, 3)[0]
    assert found[-1] < 0.5 * found[0]
    assert found == run_ranks(distilled, 2, 0)[0]


def test_the_distillation_loss_is_the_formula():
    student, teacher = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 4, 5)
    loss = xds.compression.distillation_loss
    t, ours = (teacher / 2).softmax(-1), (student / 2).log_softmax(-1)
    terms = 4 * (t * (t.log() - ours)).sum(-1)
    assert torch.allclose(loss(student, teacher, temperature=2.0), terms.mean())
    mask = torch.rand(3, 4) > 0.5
    found = loss(
        student,
        teacher,
        temperature=2.0,
        mask=mask,
        student_hidden=[student],
        teacher_hidden=[teacher],
    )
    assert torch.allclose(found, terms[mask].mean() + (student - teacher).square().mean())
    assert loss(teacher, teacher) == 0 and loss(student, teacher, mask=mask & False) == 0
    for wrong in ((student, teacher[:2]), (student, None)):
        with pytest.raises(xds.UsageError, match="must be equal"):
            loss(*wrong)
    with pytest.raises(xds.UsageError, match="mask has the shape .*without classes"):
        loss(student, teacher, mask=torch.ones(student.shape))
    with pytest.raises(xds.UsageError, match="1 hidden states of the student and 0"):
        loss(student, teacher, student_hidden=[student])


# -- clean --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width=24, heads=6):
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            part(x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mixed(nn.Module):
    """A convolution with its norm, an attention, and an MLP."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 6, 3, padding=1, stride=2)
        self.lift = nn.Linear(6, 24)
        self.attention = Attention()
        self.up, self.down = nn.Linear(24, 50), nn.Linear(50, 24)
        self.head = nn.Linear(24, 10)

    def forward(self, image):
        x = self.conv2(F.relu(self.bn1(self.conv1(image)))).flatten(2).transpose(1, 2)
        x = self.lift(x)
        x = x + self.attention(x)
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(x.mean(1))


CUT = {
    "weight_quantization": technique(
        ["up", "down", "attention", "conv", "head"], shared=IN_FORWARD, start_bits=8, target_bits=8
    ),
    "sparse_pruning": technique(["head"], dense_ratio=0.3),
    "row_pruning": technique(["^up"], [["^down"]], dense_ratio=0.5),
    "head_pruning": technique(
        ["attention.out"], [["[.]q$", "[.]k$", "[.]v$"]], {"num_heads": 6}, dense_ratio=0.5
    ),
    "channel_pruning": technique(
        ["conv1"], [["conv2", "bn1"]], {"method": "topk"}, dense_ratio=0.5
    ),
}


def trained_and_cleaned(stage):
    torch.manual_seed(dist.get_rank())  # rank 0's values win
    model = Mixed()
    engine = xds.initialize(model, config_of(CUT, stage))
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 1, 8, 8, generator=generator)
        loss = F.cross_entropy(engine(x), torch.randint(0, 10, (4,), generator=generator))
        engine.backward(loss)
        engine.step()
    engine.eval()
    with torch.no_grad():
        before = engine(x)
    state = engine.full_state_dict(rank0_only=False)
    with pytest.raises(xds.UsageError, match="call engine.destroy"):
        xds.compression.redundancy_clean(model, config_of(CUT))
    engine.destroy()
    xds.compression.redundancy_clean(model, config_of(CUT))
    late = {
        **CUT,
        "sparse_pruning": technique(["head"], shared={"schedule_offset": 9}, dense_ratio=1),
    }
    other = Mixed()
    plain = xds.compression.redundancy_clean(
        xds.initialize(other, config_of(late, stage)), config_of(late)
    )
    assert plain is other and plain.up.out_features == 25
    again = xds.compression.init_compression(Mixed(), config_of(CUT))
    again.load_state_dict(state)
    again = xds.compression.redundancy_clean(again, config_of(CUT)).eval()
    with torch.no_grad():
        return before, model(x), again(x), model


@pytest.mark.parametrize("stage", [0, 3])
def test_a_cleaned_model_is_smaller_and_has_the_results_of_the_masked_one(stage):
    before, after, again, model = run_ranks(trained_and_cleaned, 2, stage)[0]
    assert (before - after).abs().max() < 1e-6 and torch.equal(after, again)
    assert not list(compressed_layers(model)) and type(model.up) is nn.Linear
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["up.weight"] == (25, 24) and shapes["down.weight"] == (24, 25)
    assert shapes["attention.q.weight"] == (12, 24) and shapes["attention.out.weight"] == (24, 12)
    assert shapes["conv1.weight"] == (4, 1, 3, 3) and shapes["conv2.weight"] == (6, 4, 3, 3)
    assert model.bn1.num_features == len(model.bn1.running_var) == 4
    assert model.attention.num_heads == 3 and model.up.out_features == 25
    assert (model.head.weight == 0).float().mean() == pytest.approx(0.7)
    assert len(model.down.weight.unique()) <= 256 < len(model.lift.weight.unique()) * 4
    copy.deepcopy(model)


def test_gpt2_is_compressed_as_it_is_and_as_linear_layers():
    transformers = pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    sizes = {"n_layer": 2, "n_embd": 24, "n_head": 4, "vocab_size": 32, "n_positions": 16}
    small = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(small).eval()
    section = {
        "weight_quantization": technique(
            ["mlp", "attn"],
            shared={**IN_FORWARD, "quantize_groups": 4},
            start_bits=4,
            target_bits=4,
        ),
        "row_pruning": technique(["c_fc"], [["mlp.c_proj"]], dense_ratio=0.5),
        "head_pruning": technique(
            ["attn.c_proj"], [["attn.c_attn"]], {"num_heads": 4, "method": "l1"}, dense_ratio=0.5
        ),
    }
    tokens = torch.arange(10).view(1, 10)
    found = []
    for converts in (False, True):
        model = copy.deepcopy(plain)
        if converts:
            xds.compression.convert_conv1d_to_linear(model, Conv1D)
        torch.manual_seed(1)
        xds.compression.init_compression(model, config_of(section))
        xds.compression.CompressionScheduler(model)
        masked = model(tokens).logits
        xds.compression.redundancy_clean(model, config_of(section))
        assert (model(tokens).logits - masked).abs().max() < 1e-5
        found.append(masked)
        assert model.transformer.h[0].mlp.c_fc.weight.numel() == 24 * 48
        assert model.transformer.h[1].attn.num_heads == 2
    assert torch.allclose(*found, atol=1e-6)


class Gated(nn.Module):
    """An MLP as Llama has it, after an attention with 4 heads of queries and 2 of keys."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)
        self.gate, self.up, self.down = nn.Linear(16, 40), nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x):
        x = x + self.out(self.query(x) * self.key(x).repeat_interleave(2, -1))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_a_gate_is_cut_with_its_factor_and_shared_keys_are_refused():
    model, x = Gated(), torch.randn(3, 16)
    section = {"row_pruning": technique(["gate"], [["up", "down"]], dense_ratio=0.25)}
    xds.compression.init_compression(model, config_of(section))
    xds.compression.CompressionScheduler(model)
    masked = model(x)
    xds.compression.redundancy_clean(model, config_of(section))
    assert torch.allclose(model(x), masked, atol=1e-6)
    assert model.up.weight.shape == (10, 16) and model.down.weight.shape == (16, 10)
    both = {"row_pruning": technique(["gate", "up"], [["down"], ["down"]], dense_ratio=0.5)}
    with pytest.raises(xds.UsageError, match="down would be cut for gate and for up, whose masks"):
        xds.compression.init_compression(Gated(), config_of(both))
    heads = {
        "head_pruning": technique(["out"], [["query", "key"]], {"num_heads": 4}, dense_ratio=1)
    }
    with pytest.raises(xds.UsageError, match="key has 8 outputs, and out has 16 inputs"):
        xds.compression.init_compression(Gated(), config_of(heads))


def test_a_schedule_that_has_not_ended_is_told(caplog):
    for steps in (3, 4):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        section = {
            "weight_quantization": technique(start_bits=5, target_bits=4, quantization_period=5)
        }
        xds.compression.init_compression(model, config_of(section))
        scheduler = xds.compression.CompressionScheduler(model)
        for _ in range(steps):
            scheduler.step()
        xds.compression.redundancy_clean(model, config_of(section))
        told = "0 and 1 more layers change: training ended after step 3" in caplog.text
        assert told == (steps == 3) and (told or not caplog.text)
        caplog.clear()


def test_a_tied_weight_is_untied_where_only_one_layer_is_quantized(caplog):
    model = build("tied")
    section = {
        "weight_quantization": technique(["embed"], shared=IN_FORWARD, start_bits=2, target_bits=2)
    }
    xds.compression.init_compression(model, config_of(section))
    xds.compression.CompressionScheduler(model)
    before = model(micro_batch(0, 0))
    xds.compression.redundancy_clean(model, config_of(section))
    assert torch.equal(model(micro_batch(0, 0)), before)
    assert model.embed.weight is not model.head.weight
    assert "embed has its own weight now" in caplog.text


def test_encoder_layers_of_torch_do_not_skip_their_compressed_layers():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    section = {
        "weight_quantization": technique(["linear"], shared=IN_FORWARD, start_bits=2, target_bits=2)
    }
    x = torch.randn(2, 5, 16)
    plain = model.eval()(x)
    xds.compression.init_compression(model, config_of(section))
    xds.compression.CompressionScheduler(model)
    with torch.no_grad():
        quick = model.eval()(x)
    assert not torch.allclose(quick, plain, atol=1e-3)
    assert torch.allclose(quick, model.train()(x), atol=1e-6)


FIXED = {name: ALL[name] for name in ("weight_quantization", "sparse_pruning")}  # draws nothing


def from_dense_weights(on_meta):
    weights = build("plain").state_dict()
    with torch.device("meta" if on_meta else "cpu"):
        model = build("plain")
    config = config_of(FIXED, 3, 2)
    return train(xds.initialize(model, config, weights=weights), 0, 3, 2)


def test_dense_weights_start_a_compressed_model_also_on_meta():
    for on_meta in (False, True):
        found = run_ranks(from_dense_weights, 2, on_meta)
        assert found[0] == found[1] == run_ranks(losses, 2, FIXED, 3, 2, {}, 3)[0][0]


def without_a_section():
    model = xds.compression.init_compression(build("plain"), config_of(ALL))
    config = config_of({})
    return train(xds.initialize(model, config), 0, 3, 4)


def test_a_script_may_prepare_the_model_alone():
    assert run_ranks(without_a_section, 1)[0] == run_ranks(losses, 1, ALL, 0, 4, {}, 3)[0][0]


# -- students -----------------------------------------------------------------------------------------------


def test_a_student_gets_layers_of_its_teacher_by_name():
    teacher, student = Layers(4), Layers(2)
    section = {
        "layer_reduction": {
            "enabled": True,
            "module_name_prefix": "layers",
            "teacher_layer": [1, 3],
        }
    }
    xds.compression.init_compression(student, config_of(section), teacher_model=teacher)
    assert torch.equal(student.layers[0][0].weight, teacher.layers[1][0].weight)
    assert torch.equal(student.layers[1][0].bias, teacher.layers[3][0].bias)
    with pytest.raises(xds.UsageError, match="pass teacher_model"):
        xds.compression.init_compression(student, config_of(section))
    section["layer_reduction"]["teacher_layer"] = [0, 9]
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(xds.UsageError, match=r"the teacher has no module layers\.9"):
        xds.compression.student_initialization(student, teacher, config_of(section))
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"sparse_pruning": technique(["nothing"], dense_ratio=0.5)},
            "no layer of the kinds Linear",
        ),
        (
            {"sparse_pruning": technique(["up", "blocks"], dense_ratio=0.5)},
            "blocks.0.up, blocks.1.up",
        ),
        ({"sparse_pruning": technique(["*", "*"], dense_ratio=0.5)}, "let each layer match one"),
        ({"sparse_pruning": technique(["("], dense_ratio=0.5)}, "is no regular expression"),
        ({"sparse_pruning": technique(dense_ratio=0)}, "must be a number above 0, at most 1"),
        ({"sparse_pruning": technique(dense_ratio="half")}, "must be a number"),
        ({"sparse_pruning": technique(dens_ratio=0.5)}, 'did you mean "dense_ratio"'),
        (
            {"sparse_pruning": technique(shared={"method": "snip_momentum"}, dense_ratio=1)},
            '"l1" or',
        ),
        ({"head_pruning": technique(dense_ratio=0.5)}, "num_heads = null: is required"),
        (
            {"head_pruning": technique(["down"], shared={"num_heads": 5}, dense_ratio=0.5)},
            "num_heads = 5 does not divide the 72 inputs",
        ),
        ({"weight_quantization": technique(start_bits=4)}, "target_bits = null: is required"),
        (
            {"weight_quantization": technique(start_bits=4, target_bits=8)},
            "at least target_bits (8)",
        ),
        ({"weight_quantization": technique(start_bits=40, target_bits=8)}, "at most 16"),
        (
            {
                "weight_quantization": technique(
                    shared={"quantization_type": "asymmetric"}, start_bits=2, target_bits=2
                )
            },
            "must be symmetric",
        ),
        (
            {
                "weight_quantization": technique(
                    shared={"quantize_groups": 7}, start_bits=8, target_bits=8
                )
            },
            "quantize_groups = 7 does not divide",
        ),
        ({"activation_quantization": technique(bits=6)}, "bits = 6: must be 4 or 8"),
        ({"activation_quantization": {"shared_parameters": {"enabled": True}}}, "name the modules"),
        (
            {"row_pruning": technique(["up"], [["down"], ["head"]], dense_ratio=0.5)},
            "must have an entry for each of the 1 entries",
        ),
        ({"row_pruning": technique(["embed"], dense_ratio=0.5)}, "no layer of the kinds Linear"),
        ({"sparse_pruning": technique([], dense_ratio=0.5)}, "modules = []: must name layers"),
        ({"row_pruning": technique(["up"], [["("]], dense_ratio=0.5)}, 'related_modules = [["("]]'),
        (
            {"sparse_pruning": technique(["up"], [["down"]], dense_ratio=0.5)},
            "nothing is cut by it, but by row_pruning",
        ),
        (
            {"row_pruning": technique(["up"], [["head"]], dense_ratio=0.5)},
            'matches 3 layers and its related "head" 1',
        ),
        (
            {"row_pruning": technique(["head"], [["blocks.0.up"]], dense_ratio=0.5)},
            "blocks.0.up has 24 inputs, and head has 61 outputs",
        ),
        (
            {"head_pruning": technique(["down"], [["down"]], {"num_heads": 6}, dense_ratio=0.5)},
            "Leave related_modules out where heads share keys",
        ),
        (
            {
                "head_pruning": technique(
                    ["down"], [["up"]], {"num_heads": 6, "method": "l1"}, dense_ratio=0.5
                ),
                "row_pruning": technique(["up"], [["down"]], dense_ratio=0.5),
            },
            "blocks.0.down would be cut for",
        ),
    ],
)
def test_wrong_sections_are_refused_before_anything_changes(section, says):
    model = build("plain")
    kinds = [type(module) for module in model.modules()]
    with pytest.raises((xds.ConfigError, xds.UsageError), match="(?s).*") as error:
        xds.compression.init_compression(model, config_of(section))
    assert says in str(error.value), error.value
    assert [type(module) for module in model.modules()] == kinds


def test_calls_in_a_wrong_order_are_refused():
    section = {"row_pruning": technique(["up"], [["down"]], {"method": "topk"}, dense_ratio=0.5)}
    model = xds.compression.init_compression(build("plain"), config_of(section))
    with pytest.raises(xds.UsageError, match="compressed already; call it once"):
        xds.compression.init_compression(model, config_of(section))
    other = {"head_pruning": technique(["down"], [["up"]], {"num_heads": 6}, dense_ratio=0.5)}
    with pytest.raises(xds.UsageError, match="blocks.0.down is not pruned as this config says"):
        xds.compression.redundancy_clean(model, config_of(other))
    with pytest.raises(xds.UsageError, match="has prepared this model for another section"):
        prepare(model, parse_config(config_of(other)), None, None)
    with pytest.raises(xds.UsageError, match="no layer of this model is compressed"):
        xds.compression.redundancy_clean(build("plain"), config_of(section))
    with pytest.raises(xds.UsageError, match="mpu is given"):
        xds.compression.init_compression(build("plain"), config_of(section), mpu=object())
    attention = nn.MultiheadAttention(8, 2)
    quantizes = {"weight_quantization": ALL["weight_quantization"]}
    with pytest.raises(xds.UsageError, match="out_proj is a NonDynamicallyQuantizableLinear"):
        xds.compression.init_compression(attention, config_of(quantizes))


def test_layers_whose_weight_is_changed_elsewhere_are_refused():
    quantizes = {"weight_quantization": ALL["weight_quantization"]}
    hooked = prune.identity(nn.Linear(4, 4), "weight")
    for layer, says in (
        (hooked, "the weight of 0 is computed by a hook"),
        (nn.Embedding(4, 4, max_norm=1.0), "0 has max_norm"),
    ):
        with pytest.raises(xds.UsageError, match=says):
            xds.compression.init_compression(nn.Sequential(layer), config_of(quantizes))


@pytest.mark.parametrize("calibration", ["static", "dynamic"])
def test_a_batch_without_samples_passes_and_moves_no_range(calibration):
    section = {
        "activation_quantization": technique(shared={"range_calibration": calibration}, bits=8)
    }
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 3))
    xds.compression.init_compression(model, config_of(section))
    xds.compression.CompressionScheduler(model)
    model(torch.randn(3, 1, 2, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = model(torch.empty(0, 1, 2, 2))
    found.sum().backward()
    assert found.shape == (0, 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_static_ranges_move_in_training_alone():
    section = {"activation_quantization": technique(shared={"range_calibration": "static"}, bits=8)}
    model = nn.Sequential(nn.Linear(4, 3))
    xds.compression.init_compression(model, config_of(section))
    xds.compression.CompressionScheduler(model)
    first, wide, second = torch.randn(5, 4), 100 * torch.randn(5, 4), torch.randn(5, 4)
    model(first)
    model.eval()(wide)
    trained = torch.stack([first.min(), first.max()])
    torch.testing.assert_close(model[0].x_min_max, trained)
    model.train()(second)
    later = torch.stack([second.min(), second.max()])
    torch.testing.assert_close(model[0].x_min_max, 0.95 * trained + 0.05 * later)


def test_stochastic_rounding_depends_on_the_step_alone():
    shared = {"rounding": "stochastic", "quantize_groups": 1}
    section = {"weight_quantization": technique(shared=shared, start_bits=4, target_bits=4)}
    model = nn.Sequential(nn.Linear(16, 16))
    xds.compression.init_compression(model, config_of(section))
    found = []
    for step in (1, 2, 1):
        model[0].advance(step)
        found.append(model[0].compressed(model[0].weight, None)[0])
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def with_own_optimizer():
    section = {"row_pruning": technique(["up"], shared={"method": "topk"}, dense_ratio=0.5)}
    model = build("plain")
    config = config_of(section)
    del config["optimizer"]
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        xds.initialize(model, config, optimizer=optimizer)
    except xds.UsageError as error:
        return str(error)
    return ""


def test_an_optimizer_without_the_scores_is_refused():
    assert "before the optimizer is made" in run_ranks(with_own_optimizer, 1)[0]


# -- the older form, and configs of others ------------------------------------------------------------------


def bits_of(config, steps):
    engine = xds.initialize(build("plain"), config)
    found = []
    for step in range(steps):
        found.append({layer.weight_bits for _, layer in compressed_layers(engine.module)})
        train(engine, step, step + 1)
    return found


def test_quantize_training_is_the_same_as_moq():
    old = config_of({})
    old["quantize_training"] = {
        "quantize_bits": {"start_bits": 10, "target_bits": 8},
        "quantize_schedule": {"quantize_period": 2, "schedule_offset": 1},
        "quantize-algo": {"q_type": "asymmetric"},
    }
    assert run_ranks(bits_of, 1, old, 6)[0] == [{0}, {10}, {9}, {9}, {8}, {8}]
    both = {**old, "compression_training": MOQ}
    with pytest.raises(xds.ConfigError, match="keep one of the two"):
        xds.Config.load(both)


FOLDER = Path(__file__).parents[3] / "shared" / "configs"
ASKING = [
    path
    for path in sorted(FOLDER.glob("*.json"))
    if any(word in path.read_text() for word in ("compression_training", "quantize_training"))
]


class Bert(nn.Module):
    """Names of BERT and of GPT-2, which the configs' patterns find."""

    def __init__(self):
        super().__init__()
        layer = nn.ModuleDict(
            {
                "attention": nn.ModuleDict(
                    {
                        "self": nn.ModuleDict(
                            {name: nn.Linear(64, 64) for name in ("query", "key", "value")}
                        ),
                        "output": nn.ModuleDict({"dense": nn.Linear(64, 64)}),
                    }
                ),
                "intermediate": nn.ModuleDict({"dense": nn.Linear(64, 64)}),
                "output": nn.ModuleDict({"dense": nn.Linear(64, 64)}),
                "attn": nn.ModuleDict({name: nn.Linear(64, 64) for name in ("c_attn", "c_proj")}),
                "mlp": nn.ModuleDict({name: nn.Linear(64, 64) for name in ("c_fc", "c_proj")}),
            }
        )
        self.word_embeddings = nn.Embedding(64, 64)
        self.layer = nn.ModuleList([layer])
        self.layer1 = nn.ModuleList(
            [nn.ModuleDict({"conv1": nn.Conv2d(1, 4, 4), "bn1": nn.BatchNorm2d(4)})]
        )
        self.layer1[0]["conv2"] = nn.Conv2d(4, 64, 3)

    def forward(self, tokens):
        x = self.word_embeddings(tokens)
        for layer in self.layer.modules():
            if isinstance(layer, nn.Linear):
                x = x + layer(x).tanh()
        image = x.new_zeros(2, 1, 8, 8) + x.mean()
        for name in ("conv1", "bn1", "conv2"):
            image = self.layer1[0][name](image)
        return x.square().mean() + image.float().square().mean()


def of_others(path):
    config = json.loads(path.read_text())
    config |= {"train_micro_batch_size_per_gpu": 2, "steps_per_print": None}
    for key in ("train_batch_size", "tensorboard"):
        config.pop(key, None)
    config.setdefault("optimizer", {"type": "Adam", "params": {"lr": 1e-3}})
    if config.get("fp16", {}).get("enabled"):
        config["fp16"]["initial_scale_power"] = 4
    torch.manual_seed(0)
    engine = xds.initialize(Bert(), config)
    found = []
    for _ in range(3):
        loss = engine(torch.arange(10).view(2, 5))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found, engine.skipped_steps, len(compressed_layers(engine.module))


@pytest.mark.contract
@pytest.mark.skipif(not ASKING, reason=f"no configs in {FOLDER}")
def test_configs_that_ask_for_compression_train():
    for path in ASKING:
        found, skipped, count = run_ranks(of_others, 2, path)[0]
        assert found[-1] < found[0] and skipped == 0 and count > 0, path
    assert len(ASKING) == 8
