"""Cutting plain models: every stage runs the model's own forward, numbers as without a pipeline."""

import copy

import models
import pytest
import torch
from stages_in_one_process import Loop, cut_all, gradients, plain_training, train
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from xds.pipe.cut.cutting import cut_model
from xds.pipe.cut.plain_models import EmbeddingAndHead
from xds.pipe.inputs import kind
from xds.utils.errors import UsageError
from xds.zero.layout.discover import found_blocks


def call(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(batch)


def check_equal(model, placement, batches, tolerance=1e-6, **options):
    """Losses and gradients equal those of the whole model. Returns the parts."""
    parts = cut_all(model, found_blocks, placement, **options)
    losses, expected = plain_training(copy.deepcopy(model), call, batches)
    assert train(parts, placement, batches) == pytest.approx(losses, abs=tolerance)
    found = gradients(parts)
    for name, grad in expected.items():
        if name in found:
            torch.testing.assert_close(found[name], grad, rtol=tolerance, atol=tolerance)
        else:
            assert not grad.any(), name
    assert set(found) <= set(expected)
    return parts


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_hugging_face_models_equal_the_whole_model(name):
    pytest.importorskip("transformers")
    from real_models import batch, build

    model = build(name)
    exact = 0.0 if name == "mixtral" else 1e-6  # of a tied weight, two sums are added
    check_equal(model, Loop(3), [batch(name, step, samples=2) for step in range(2)], exact)


def tiny_hugging_face(name):
    """A tiny model of a class that `real_models` does not have, and a batch."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1234)
    small = dict(vocab_size=61, hidden_size=24, num_hidden_layers=4, num_attention_heads=2)
    if name == "opt":
        config = transformers.OPTConfig(
            **small, ffn_dim=40, max_position_embeddings=32, word_embed_proj_dim=20, dropout=0.0
        )
        return transformers.OPTForCausalLM(config).train()
    if name == "bert":
        config = transformers.BertConfig(
            **small,
            intermediate_size=40,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return transformers.BertForMaskedLM(config).train()
    text = dict(intermediate_size=40, num_key_value_heads=1, head_dim=12, sliding_window=4)
    config = transformers.Gemma3TextConfig(**small, **text, max_position_embeddings=32)
    config.layer_types = ["sliding_attention"] * 3 + ["full_attention"]
    return transformers.Gemma3ForCausalLM(config).train()


@pytest.mark.parametrize("name", ["opt", "bert", "gemma3"])
@pytest.mark.quick("bert")
def test_models_with_masks_norms_and_projections_equal_the_whole_model(name):
    model = tiny_hugging_face(name)
    ids = torch.randint(3, 61, (2, 10))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    batches = [
        {"input_ids": ids, "labels": ids},
        {"input_ids": ids, "labels": ids, "attention_mask": mask},
    ]
    check_equal(model, Loop(4), batches)
    check_equal(model, Loop(2, 2, is_v=True), batches)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "opt", "bert", "gemma3"])
@pytest.mark.quick("gpt2", "gemma3")
def test_the_first_and_the_last_stage_may_have_no_blocks(name):
    pytest.importorskip("transformers")
    from real_models import batch, build

    if name in ("gpt2", "mixtral"):
        model = build(name)
        batches = [batch(name, step, samples=2) for step in range(2)]
    else:
        model, ids = tiny_hugging_face(name), torch.randint(3, 61, (2, 10))
        batches = [{"input_ids": ids, "labels": ids}] * 2
    num_blocks = len(found_blocks(model))
    parts = check_equal(model, Loop(num_blocks + 2), batches)
    assert [len(part.blocks) for part in parts] == [0, *[1] * num_blocks, 0]
    check_equal(model, Loop(num_blocks + 1), batches, partition="uniform")
    check_equal(model, Loop(2, 2, is_v=True), batches, partition=[0, 0, 1, num_blocks, num_blocks])
    check_equal(model, Loop(2), batches, partition=[0, num_blocks, num_blocks])
    check_equal(model, Loop(2), batches, partition=[0, 0, num_blocks])


def test_a_last_stage_without_blocks_needs_a_module_that_is_called_after_them():
    model = models.build("plain")
    assert not hasattr(model, "dummy_inputs")
    message = "needs 3 rising bounds from 0 to 3"
    with pytest.raises(UsageError, match=message):
        cut_model(model, found_blocks(model), Loop(2), 0, [0, 3, 3])
    batches = [models.micro_batch(0, number) for number in range(2)]
    check_equal(model, Loop(2), batches, partition=[0, 0, 3])


class Supervised(models.TinyModel):
    """Calls its norm after each block, which one stage alone cannot have."""

    dummy_inputs = {"tokens": torch.zeros(1, 4, dtype=torch.long)}
    is_deep = True

    def forward(self, tokens):
        x, loss = self.embed(tokens[:, :-1]), 0
        for block in self.blocks:
            x = block(x)
            if self.is_deep:
                loss = loss + self.norm(x).sum()
        return loss + F.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten()
        )


def test_a_head_that_is_called_before_all_blocks_have_run_gets_a_sentence():
    torch.manual_seed(0)
    model, batches = Supervised(), [models.micro_batch(0, number) for number in range(2)]
    part = cut_model(model, found_blocks(model), Loop(2), 0, [0, 3, 3])
    with pytest.raises(
        UsageError, match="calls norm before all blocks .* give it one in pipeline.partition"
    ):
        part.run(0, batches[0], None, 0)
    model = Supervised()
    model.is_deep = False
    check_equal(model, Loop(2), batches, partition=[0, 3, 3])


FEATURES = (
    *("tied", "tied_blocks", "frozen", "unused", "reused", "mixed_shapes"),
    *("checkpointed_reentrant", "compiled_blocks"),
)


@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_models_equal_the_whole_model(feature):
    batches = [models.micro_batch(0, number) for number in range(2)]
    model = models.build(feature)
    parts = check_equal(model, Loop(3), batches, partition="uniform")
    shared = {"tied": "embed.weight", "tied_blocks": "blocks.0.up.weight", "mixed_shapes": "gain"}
    if feature in shared:
        assert parts[1].shared == {shared[feature]: (0, 2)}
    if feature == "tied":
        assert parts[2].aliases["head.weight"] == "embed.weight"
        assert "embed.weight" in parts[2].names.values()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_recomputed_hugging_face_models_equal_the_whole_model():
    pytest.importorskip("transformers")
    from real_models import batch, build

    batches = [batch("llama", step, samples=2) for step in range(2)]
    check_equal(build("llama", "recomputed_reentrant"), Loop(3), batches)


WIDTH = 6


class Layer(nn.Module):
    """A block with several inputs; writes to its first argument and returns more than it got."""

    def __init__(self, is_routed=False):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_routed = is_routed

    def forward(self, x, first=None, extras=None):
        extras = dict(extras or {})
        x.mul_(0.5)
        if self.is_routed:  # a shape that depends on values: impossible on the meta device
            rows = (x.sum(-1) > 0).nonzero()
            x = x.index_put((rows[:, 0], rows[:, 1]), x[rows[:, 0], rows[:, 1]] * 0.5)
        x = x + torch.tanh(self.linear(x))
        if first is not None:
            x = x + first
        extras["chosen"] = x.detach().argmax(-1)
        extras["frozen"] = x.detach().mean(-1, keepdim=True)
        return x + extras["frozen"] * extras["chosen"].float().mean(), extras


class Net(nn.Module):
    """A model whose forward does one unusual thing, named by `kind`."""

    def __init__(self, kind, depth=3):
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(11, WIDTH)
        self.late = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(kind == "routed") for _ in range(depth)])
        self.early = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.linspace(0, 1, WIDTH))

    def forward(self, tokens):
        kind, extras = self.kind, None
        x = self.embed(tokens)
        if kind == "named_sides":
            x = self.early(x)
        if kind == "reads":
            x = x * x.max().item()
        mask = (tokens > 3).unsqueeze(-1) * self.offset
        first = x * 1.0
        x = x * 2.0 + mask
        for number, layer in enumerate(self.layers):
            if kind in ("first", "first_recomputed"):
                x, extras = self._call(layer, x, first, extras)
            elif kind == "slices":
                x, extras = layer(x, first[..., :1] * number, extras)
            elif kind == "mask":
                x, extras = layer(x + 0.0 if number else x, mask, extras)
            else:
                x, extras = layer(x, None, extras)
        if kind == "around":
            x = x + first
        if kind == "reads_weight":
            return F.linear(x, self.embed.weight).logsumexp(-1).mean()
        if kind == "compiled":
            x = torch.compile(torch.tanh, backend="eager", fullgraph=True)(x)
        return self.late(x).square().mean() + extras["frozen"].mean()

    def _call(self, layer, x, first, extras):
        if self.kind == "first_recomputed":
            extras = {}
            x = checkpoint(lambda x, y: layer(x.clone(), y)[0], x, first, use_reentrant=False)
            return x, {"frozen": x.detach().mean(-1)}
        return layer(x, first, extras)


def tokens(count=2):
    generator = torch.Generator().manual_seed(7)
    return list(torch.randint(0, 11, (count, 2, 5), generator=generator))


def made(kind, depth=4):
    torch.manual_seed(3)
    return Net(kind, depth)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    "kind", ["plain", "first", "first_recomputed", "mask", "routed", "compiled"]
)
def test_integers_frozen_tensors_and_further_inputs_flow(kind):
    placement = Loop(2, 2) if kind in ("first", "mask") else Loop(4)
    sides = EmbeddingAndHead(last=["late"])
    model = made(kind)
    model.embed.requires_grad_(kind != "plain")
    random = torch.get_rng_state()
    check_equal(model, placement, tokens(), sides=sides)
    assert torch.equal(torch.get_rng_state(), random)


def test_named_sides_and_what_is_sent():
    sides = EmbeddingAndHead(first=["early"], last=["late"])
    check_equal(made("named_sides"), Loop(2), tokens(), sides=sides)
    model = made("mask")
    part = cut_model(model, found_blocks(model), Loop(4), 0, sides=sides)
    flow = part.run(0, tokens(1)[0], None, 0)
    assert [leaf.dtype for leaf in flow.leaves] == [torch.float32, torch.int64, torch.float32]
    assert part.run(0, tokens(1)[0], None, 0).spec == flow.spec


REFUSED = {
    "wrong side": (
        "plain",
        {},
        'calls late after the blocks.*"late" to pipeline.last_stage_modules',
    ),
    "skip connection": (
        "around",
        {"sides": EmbeddingAndHead(last=["late"])},
        "computes .* from before its blocks",
    ),
    "slices": (
        "slices",
        {"sides": EmbeddingAndHead(last=["late"])},
        "computes .* from before its blocks",
    ),
    "read": (
        "reads",
        {"sides": EmbeddingAndHead(last=["late"])},
        r"reads \(item\) a value that depends",
    ),
    "weight": (
        "reads_weight",
        {},
        'reads embed.weight after .*"embed" to pipeline.last_stage_modules',
    ),
    "glob": (
        "plain",
        {"sides": EmbeddingAndHead(first=["nothing*"])},
        '"nothing\\*" matches no module',
    ),
    "stages": (
        "plain",
        {"depth": 2},
        "4 stages .* for 2 layers; each stage but the first one needs",
    ),
    "bounds": ("plain", {"partition": [0, 2, 4]}, "needs 5 rising bounds from 0 to 4"),
}


def test_what_cannot_be_cut_gets_a_sentence():
    for name, options, message in REFUSED.values():
        options = dict(options)
        model = made(name, options.pop("depth", 4))
        with pytest.raises(UsageError, match=message):
            train(cut_all(model, found_blocks, Loop(4), **options), Loop(4), tokens())


def test_weights_that_both_sides_read_are_on_both():
    sides = EmbeddingAndHead(first=["embed"], last=["embed"])
    parts = check_equal(made("reads_weight"), Loop(4), tokens(), sides=sides)
    assert parts[0].shared == {"embed.weight": (0, 3)}


def test_models_without_one_list_and_collected_outputs_are_refused():
    transformers = pytest.importorskip("transformers")
    from real_models import batch, build

    model = build("t5")
    with pytest.raises(UsageError, match="2 lists of blocks .encoder.block, decoder.block"):
        cut_model(model, found_blocks(model), Loop(2), 0)
    with pytest.raises(UsageError, match="Linear has no list of blocks"):
        cut_model(nn.Linear(2, 2), [], Loop(2), 0)
    model = build("mixtral")
    model.config.output_router_logits = True
    with pytest.raises(UsageError, match="output_router_logits = true: router logits of all"):
        cut_model(model, found_blocks(model), Loop(2), 0)
    model.config.output_router_logits = False
    part = cut_model(model, found_blocks(model), Loop(2), 0)
    with pytest.raises(UsageError, match="the batch has output_attentions = True"):
        part.run(0, {**batch("mixtral", 0), "output_attentions": True}, None, 0)
    assert transformers


def test_other_stages_take_no_memory_and_classes_come_back():
    model = models.build("mixed_shapes")
    kinds = [type(module) for module in model.modules()]
    part = cut_model(model, found_blocks(model), Loop(3), 1, "uniform")
    assert part.module is model and set(part.names.values()) == {
        f"blocks.1.{name}.{kind}" for name in ("norm", "up", "down") for kind in ("weight", "bias")
    }
    assert [block.name for block in part.blocks] == ["blocks.1"]
    assert isinstance(model.blocks[1], models.Block)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    assert model.gain.untyped_storage().nbytes() == 4 and model.blocks[0].up.weight.is_meta
    assert type(model.blocks[1]) not in kinds
    part.restore()
    assert type(model.blocks[1]) in kinds


def test_stand_ins_follow_casts_after_the_cut():
    name = "vit"
    pytest.importorskip("transformers")
    from real_models import batch, build

    model, placement = build(name), Loop(3)
    batches = [batch(name, 0, samples=2, dtype=torch.bfloat16)]
    parts = cut_all(model, found_blocks, placement)
    for part in parts:
        for param in part.module.parameters():
            param.data = param.data.bfloat16()
    for param in model.parameters():
        param.data = param.data.bfloat16()
    losses, _ = plain_training(model, call, batches)
    assert train(parts, placement, batches) == losses


def test_models_on_the_meta_device_are_cut_without_memory():
    with torch.device("meta"):
        model = models.TinyModel("mixed_shapes")
    part = cut_model(model, found_blocks(model), Loop(3), 1, "uniform")
    assert all(param.is_meta for param in part.module.parameters())
    assert sorted(part.names.values())[0] == "blocks.1.down.bias" and len(part.names) == 6
    assert part.whole["head.weight"] == (models.VOCAB, models.WIDTH)


class Segments(models.TinyModel):
    """Recomputes its first two blocks together."""

    is_reentrant = False

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        first, second, third = self.blocks
        x = checkpoint(lambda x: second(first(x)), x, use_reentrant=self.is_reentrant)
        x = checkpoint(third, x, use_reentrant=self.is_reentrant)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def test_blocks_of_two_stages_that_are_recomputed_together():
    torch.manual_seed(0)
    model, batches = Segments(), [models.micro_batch(0, number) for number in range(2)]
    check_equal(model, Loop(3), batches, partition="uniform")
    model.is_reentrant = True
    check_equal(model, Loop(2), batches, partition="uniform")
    part = cut_model(model, found_blocks(model), Loop(3), 0, "uniform")
    with pytest.raises(UsageError, match="reentrant activation checkpoint covers blocks of two"):
        part.run(0, batches[0], None, 0)


def test_a_batch_with_a_mask_or_packed_tokens_is_of_another_kind():
    """Models of transformers take another way through their layers then."""
    whole, padded = torch.ones(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)
    padded[0, 3] = 0
    assert kind({"attention_mask": padded}) == kind({"attention_mask": 0 * whole})
    assert kind({"attention_mask": padded}) != kind({"attention_mask": whole})
    rising, packed = torch.arange(4).expand(2, 4), torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    assert kind({"position_ids": rising}) != kind({"position_ids": packed})
