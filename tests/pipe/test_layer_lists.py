"""Cutting lists of layers: nn.Sequential and PipelineModule."""

import copy
import warnings

import pytest
import torch
from stages_in_one_process import Loop, cut_all, gradients, plain_training, train
from torch import nn
from torch.nn import functional as F

from xds.pipe.cut.cutting import cut_model
from xds.pipe.module import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec
from xds.utils.errors import UsageError

WIDTH, VOCAB = 12, 17


class Embed(nn.Module):
    """Tokens to a dictionary of hidden states, an integer and a frozen tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens):
        return {"x": F.embedding(tokens, self.weight) * self.scale, "tokens": tokens, "step": 3}


class Mix(nn.Module):
    """Changes the dictionary that it got."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, values):
        values["x"] = values["x"] + torch.tanh(self.linear(values["x"])) * values["step"]
        values["kept"] = (values["tokens"], [values["x"].detach().mean(-1)])
        return values


def project(embed, values):
    """The head of a language model with the embedding's weight."""
    return F.linear(values["x"], embed.weight)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers():
    first = TiedLayerSpec("embed", Embed, tied_weight_attr="weight")
    last = TiedLayerSpec("embed", Embed, forward_fn=project)
    return [first, *(LayerSpec(Mix, WIDTH) for _ in range(4)), keep_all, last]


def keep_all(values):
    return values


def batches(count=2):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (count, 2, 3, 6), generator=generator)
    return [(pair[0], pair[1]) for pair in tokens]


def call_pipeline(model, batch):
    outputs = model(batch[0])
    return model.loss_fn(outputs, batch[1]) if model.loss_fn is not None else outputs


def whole_model(**options):
    torch.manual_seed(0)
    model = PipelineModule(layers(), loss_fn=cross_entropy, **options)
    model.build(range(len(model.layers)))
    return model


def no_blocks(model):
    return []


def check_equal(model, placement, call, given, **options):
    parts = cut_all(model, no_blocks, placement, **options)
    losses, expected = plain_training(copy.deepcopy(model), call, given)
    assert train(parts, placement, given) == pytest.approx(losses, abs=1e-6)
    found = gradients(parts)
    assert set(found) == set(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-6, atol=1e-6)
    return parts


@pytest.mark.parametrize("placement", [Loop(1), Loop(3), Loop(2, 2), Loop(2, 2, is_v=True)])
def test_tied_layers_equal_the_whole_model(placement):
    model = whole_model(activation_checkpoint_interval=0)
    model.activation_checkpoint_interval = 2 if placement.num_ranks == 3 else 0
    parts = check_equal(model, placement, call_pipeline, batches(), partition="uniform")
    ends = (0, placement.num_ranks - 1)
    is_shared = placement.num_ranks > 1 and not placement.is_v
    shared = {"tied_modules.embed.weight": ends, "tied_modules.embed.scale": ends}
    assert parts[0].shared == (shared if is_shared else {})
    assert all(part.whole == parts[0].whole for part in parts)


def test_specs_are_built_on_their_own_rank_only():
    built = []

    class Counted(nn.Linear):
        def __init__(self, number):
            super().__init__(4, 4)
            if not self.weight.is_meta:
                built.append(number)

    for rank in range(3):
        model = PipelineModule([LayerSpec(Counted, number) for number in range(6)])
        part = cut_model(model, [], Loop(3), rank, "uniform")
        assert built == [2 * rank, 2 * rank + 1]
        assert [name for name, _ in part.module.named_parameters()] == [
            f"{layer}.{name}" for layer in built for name in ("weight", "bias")
        ]
        assert part.whole == {
            f"{layer}.{name}": shape
            for layer in range(6)
            for name, shape in (("weight", (4, 4)), ("bias", (4,)))
        }
        built.clear()


def test_values_of_seeded_layers_do_not_depend_on_the_cut():
    def values(placement):
        found = {}
        for rank in range(placement.num_ranks):
            torch.manual_seed(rank)
            model = PipelineModule(layers(), seed_layers=True, loss_fn=cross_entropy)
            part = cut_model(model, [], placement, rank, "uniform")
            for param in part.module.parameters():
                name = part.names[id(param)]
                assert name not in found or torch.equal(found[name], param)
                found[name] = param
        return found

    whole, cut = values(Loop(1)), values(Loop(3))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_the_constructor_builds_own_layers_in_a_distributed_environment(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # other tests start it
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = PipelineModule(layers(), num_stages=2, partition_method="uniform")
    names = [name for name, _ in model.named_parameters()]
    assert names[0] == "4.linear.weight" and names[-1] == "tied_modules.embed.scale"
    part = cut_model(model, [], Loop(2), 1)
    assert [name for name, _ in part.module.named_parameters()] == names
    assert part.shared["tied_modules.embed.weight"] == (0, 1)
    with pytest.raises(UsageError, match="only its own stage's layers"):
        model(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(UsageError, match="leave num_stages out"):
        cut_model(PipelineModule(layers(), num_stages=2), [], Loop(2, 2), 1)
    twisted = DualPipeVModule(layers(), num_stages=2, partition_method="uniform")
    assert [name for name, _ in twisted.named_children()] == ["2", "3", "4"]


def test_an_unbuilt_module_runs_as_an_ordinary_one():
    model = PipelineModule(layers(), loss_fn=cross_entropy)
    assert model(batches(1)[0][0]).shape == (3, 6, VOCAB)
    assert len(list(model.parameters())) == 10


def test_tied_layers_of_two_classes_share_the_named_weight():
    specs = [
        TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("embed", nn.Linear, WIDTH, VOCAB),
    ]
    model = PipelineModule(specs, loss_fn=cross_entropy)
    model.build(range(3))
    parts = check_equal(model, Loop(3), call_pipeline, batches(), partition="uniform")
    assert parts[0].shared == {"tied_modules.embed.weight": (0, 2)}
    assert parts[0].aliases["2.weight"] == "tied_modules.embed.weight"


class Loss(nn.Module):
    def forward(self, x):
        return {"loss": x.square().mean(), "x": x}


def test_sequential_with_frozen_layers_and_operations_in_place():
    torch.manual_seed(0)
    body = [layer for _ in range(4) for layer in (nn.Linear(5, 5), nn.ReLU(inplace=True))]
    model = nn.Sequential(*body, nn.Linear(5, 2), Loss())
    model[0].requires_grad_(False)
    model[4].requires_grad_(False)
    given = [torch.randn(3, 5) for _ in range(2)]
    for bounds in ([0, 1, 5, 10], [0, 3, 4, 10]):
        check_equal(model, Loop(3), lambda model, x: model(x), given, partition=bounds)


def odd_list(layer):
    return PipelineModule([LayerSpec(Mix, 3), layer, LayerSpec(Mix, 3)])


def test_bad_lists_get_a_sentence():
    for make, message in (
        (lambda: odd_list(3), "layer 1 is a int"),
        (lambda: odd_list(TiedLayerSpec("a", Mix, 3)), 'key "a" is used by one layer only'),
        (lambda: PipelineModule([]), "layers is empty"),
        (lambda: LayerSpec(keep_all), "needs a subclass of torch.nn.Module"),
        (lambda: cut_model(odd_list(keep_all), [], Loop(4), 0), "4 stages .* for 3 layers"),
    ):
        with pytest.raises(UsageError, match=message):
            make()


def test_what_cannot_be_sent_gets_a_sentence():
    model = PipelineModule([keep_all, lambda x: {1, 2}, LayerSpec(Mix, 3)])
    part = cut_model(model, [], Loop(2), 0, [0, 2, 3])
    with pytest.raises(UsageError, match="stage 0 returned an object of class set"):
        part.run(0, (torch.ones(1), None), None, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = PipelineModule([keep_all, LayerSpec(Mix, 3)], loss_fn=cross_entropy)
        with pytest.raises(UsageError, match=r"gave a Tensor; .* \(inputs, labels\)"):
            cut_model(model, [], Loop(2), 0).run(0, torch.ones(1), None, 0)
