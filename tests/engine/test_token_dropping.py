"""Random-LTD and the legacy curriculum: equal to plain PyTorch with the same tokens, masks and positions."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config, differing
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds import ConfigError, UsageError
from xds.engine.dropping.choices import TOKENS, subset, uniform
from xds.engine.dropping.tokens import find_layers

WIDTH, HEADS, LENGTH, SAMPLES, LAYERS, KEPT = 16, 2, 12, 2, 4, 7
IDS = (1, 2)


def section(kept: int = KEPT, ids: Any = IDS, **more: Any) -> dict[str, Any]:
    schedule = {"min_value": kept, "max_value": LENGTH, "schedule_type": "fixed_linear"}
    schedule["schedule_config"] = {"require_steps": 10**6, "seq_per_step": 1}
    random_ltd = {
        "enabled": True,
        "total_layer_num": LAYERS,
        "random_ltd_layer_num": len(ids),
        "random_ltd_layer_id": list(ids),
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": schedule,
        **more,
    }
    return {"enabled": True, "data_routing": {"enabled": True, "random_ltd": random_ltd}}


class Layer(nn.Module):
    """Attention with positions and a mask, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, None]:
        x = hidden_states
        samples, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(samples, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        assert position_embeddings is not None and position_ids is not None
        cos, sin = (one.unsqueeze(1) for one in position_embeddings)
        q, k = q * cos + q.flip(-1) * sin, k * cos + k.flip(-1) * sin
        q = q + 0.01 * position_ids[:, None, :, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape)), None


class Model(nn.Module):
    """`kept(number)`: the tokens of each sample that a layer computes in the reference; None: all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, kept: Any = None) -> Tensor:
        x = self.embed(tokens)
        length = tokens.shape[1]
        mask = (
            torch.ones(length, length, dtype=torch.bool).tril()[None, None].repeat(len(x), 1, 1, 1)
        )
        mask[0, :, :, :2] = False  # padding at the left of the first sample
        mask[0, :, :2, :2] = True
        positions = torch.arange(length)[None]
        angles = positions[..., None] * torch.tensor([1.0, 0.1, 1.0, 0.1, 0.3, 0.2, 0.5, 0.4])
        rotary = (angles.cos(), angles.sin())
        for number, layer in enumerate(self.layers):
            rows = None if kept is None else kept(number)
            if rows is None:
                x = layer(x, mask, position_ids=positions, position_embeddings=rotary)[0]
                continue
            whole = x.clone()
            for at, row in enumerate(rows):
                parts = [one[:, row] for one in rotary]
                part = mask[at : at + 1][:, :, row][:, :, :, row]
                found = layer(x[at : at + 1, row], part, positions[:, row], tuple(parts))[0]
                whole[at, row] = found[0]
            x = whole
        return x.square().mean()


def tokens_of(step: int, ranks: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 32, (SAMPLES * ranks, LENGTH), generator=generator)


def build_model() -> Model:
    torch.manual_seed(3)
    return Model()


def run(stage: int, efficiency: Any = None, by_class: bool = False, **more: Any) -> Any:
    rank = dist.get_rank()
    sections = {} if efficiency is None else {"data_efficiency": efficiency}
    engine = xds.initialize(build_model(), config(stage, samples=SAMPLES, **sections, **more))
    if by_class:
        engine.drop_tokens_in(Layer)
    found = []
    for step in range(3):
        loss = engine(tokens_of(step, dist.get_world_size()).split(SAMPLES)[rank])
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    values = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return found, values


def reference() -> tuple[list[float], dict[str, Any]]:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    found = []
    for step in range(3):
        for rank, batch in enumerate(tokens_of(step).split(SAMPLES)):

            def kept(number: int, step: int = step, rank: int = rank) -> Any:
                if number not in IDS:
                    return None
                scores = uniform(TOKENS, 1234, step, rank, number, SAMPLES * LENGTH)
                return torch.from_numpy(subset(scores.reshape(SAMPLES, LENGTH), KEPT))

            loss = model(batch, kept)
            (loss / 2).backward()
            found += [loss.item()] if rank == 0 else []
        optimizer.step()
        optimizer.zero_grad()
    return found, model.state_dict()


@pytest.mark.parametrize(("stage", "by_class"), [(0, True), (2, False), (3, True)])
def test_masks_and_positions_go_with_the_kept_tokens(stage, by_class):
    wanted, values = reference()
    found, own_values = run_ranks(run, 2, stage, section(), by_class)[0]
    assert found == pytest.approx(wanted, rel=1e-5)
    assert list(own_values) == list(values)  # names stay, so checkpoints load with and without
    assert not differing(own_values, values, atol=2e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_all_tokens_have_the_bits_of_a_plain_run(stage):
    losses, values = run_ranks(run, 2, stage)[0]
    found, own_values = run_ranks(run, 2, stage, section(LENGTH))[0]
    assert found == losses
    assert not differing(own_values, values)


@pytest.mark.parametrize(
    "more",
    [
        {"activation_checkpointing": {"enabled": True}},
        {"compile": {"enabled": True, "backend": "aot_eager"}},
        {"progressive_layer_drop": {"enabled": True, "theta": 1.0}},
    ],
)
@pytest.mark.quick("more0", "more2")
def test_other_features_keep_the_same_tokens(more):
    wanted = run_ranks(run, 2, 3, section())[0][0]
    assert run_ranks(partial(run, **more), 2, 3, section())[0][0] == pytest.approx(wanted, rel=1e-6)


def test_layer_numbers_match_exactly():
    layers = [(f"h.{number}", nn.Identity()) for number in range(12)]
    assert [name for _, name, _ in find_layers(layers, [1, 10], is_whole=True)] == ["h.1", "h.10"]
    with pytest.raises(UsageError, match="12 match no layer"):
        find_layers(layers, [1, 12], is_whole=True)
    with pytest.raises(UsageError, match="1 matches h.1 and g.1"):
        find_layers([*layers, ("g.1", nn.Identity())], [1], is_whole=True)


def test_numbers_without_a_layer_are_refused_before_the_first_step():
    with pytest.raises(AssertionError, match="match no layer of the model"):
        run_ranks(run, 1, 0, section(ids=(1, 9), total_layer_num=10))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"random_ltd_layer_num": 3}, "must equal the number of layers"),
        ({"random_ltd_layer_id": []}, "name the layers"),
        ({"total_layer_num": 2}, "above every number"),
        ({"random_ltd_layer_id": [1, 1]}, "twice"),
        ({"random_ltd_schedule": {"min_value": 8}}, "needs the key"),
        ({"layer_token_lr_schedule": {"enabled": True}}, "never implemented"),
    ],
)
def test_a_section_that_does_not_fit_is_refused(more, said):
    with pytest.raises(ConfigError, match=said):
        xds.Config.load({"train_batch_size": 1, "data_efficiency": section(**more)})


def test_sequence_ranks_and_dropped_tokens_exclude_one_another():
    data = {"train_batch_size": 1, "sequence_parallel_size": 2, "data_efficiency": section()}
    with pytest.raises(ConfigError, match="all tokens of a sample"):
        xds.Config.load(data)


def test_sections_of_deepspeeds_examples_load():
    ids = list(range(1, 23))
    efficiency = section(128, ids, total_layer_num=24)
    schedule = {"min_value": 128, "max_value": 1024, "schedule_type": "fixed_linear"}
    schedule["schedule_config"] = {"require_steps": 400, "seq_per_step": 8}
    efficiency["data_routing"]["random_ltd"]["random_ltd_schedule"] = schedule
    layers = {"enabled": True, "theta": 0.5, "gamma": 0.001}
    data = {"train_batch_size": 4096, "progressive_layer_drop": layers}
    found = xds.Config.load({**data, "data_efficiency": efficiency})
    assert found.data_efficiency.drops_tokens and found.progressive_layer_drop.theta == 0.5


# -- the legacy curriculum ------------------------------------------------------------------------------

RISES = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 2,
    "max_difficulty": 8,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 2},
}


class Cuts(nn.Module):
    """Cuts its input to `curriculum_seqlen`, and keeps the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.lengths: list[int] = []

    def forward(self, x: Tensor, curriculum_seqlen: int | None = None) -> Tensor:
        x = x[:, :curriculum_seqlen]
        self.lengths.append(x.shape[1])
        return self.layer(x).square().mean()


def lengths(curriculum: Any, function: Any = None) -> list[int]:
    model = Cuts()
    engine = xds.initialize(model, config(2, curriculum_learning=curriculum))
    if function is not None:
        engine.set_custom_curriculum_learning_schedule(function)
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 16, 4)))
        engine.step()
    engine.eval()
    engine(torch.ones(2, 16, 4))
    engine.destroy()
    return model.lengths


def test_the_forward_gets_the_difficulty_of_the_step_that_it_begins():
    assert run_ranks(lengths, 2, RISES)[0] == [4, 6, 8, 8, 16]
    custom = {**RISES, "schedule_type": "custom"}
    assert run_ranks(lengths, 1, custom, {"seqlen": lambda step: step})[0] == [1, 2, 3, 4, 16]
    with pytest.raises(AssertionError, match="its function of the step is not given"):
        run_ranks(lengths, 1, custom)


def test_a_model_without_the_keyword_is_refused():
    with pytest.raises(AssertionError, match="does not take curriculum_seqlen"):
        run_ranks(partial(run, curriculum_learning=RISES), 1, 0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_difficulty": 1}, "at least min_difficulty"),
        ({"schedule_config": {}}, "needs the keys"),
        ({"schedule_config": {"total_curriculum_step": 0, "difficulty_step": 2}}, "above 0"),
        ({"schedule_type": "sine"}, "fixed_linear"),
    ],
)
def test_a_curriculum_that_does_not_fit_is_refused(more, said):
    with pytest.raises(ConfigError, match=said):
        xds.Config.load({"train_batch_size": 1, "curriculum_learning": {**RISES, **more}})
