"""Progressive layer drop: equal to plain PyTorch with the same choices, and a dropped block sends nothing."""

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import DEPTH, build, micro_batch
from runs import config, differing, train
from torch import nn
from torch.nn import functional as F

import xds
from xds import ConfigError
from xds.engine.data.schedules import LayerDrop
from xds.engine.dropping.choices import LAYERS, uniform

THETA, GAMMA, STEPS = 0.2, 1.0, 6
BETWEEN = 4  # a step whose first micro-batch drops a block that the second keeps, and the reverse
DROPS = {"enabled": True, "theta": THETA, "gamma": GAMMA}
SAMPLES = 2  # of a rank
KNOWN = [0.41443811481792625, 0.5662354044752963, 0.320797504894735]


def keeps(step: int, micro_step: int) -> list[float | None]:
    """The probability of each block that is kept; None: it is dropped."""
    theta = LayerDrop(THETA, GAMMA).at(step)
    draws = uniform(LAYERS, 0, step, micro_step, 0, DEPTH)
    found = [1 - number / DEPTH * (1 - theta) for number in range(1, DEPTH + 1)]
    return [keep if draw < keep else None for keep, draw in zip(found, draws, strict=True)]


def run(stage: int, accumulation: int = 1, feature: str = "plain", **more: Any) -> Any:
    """Losses of this rank and norms, the whole state dict, and the bytes sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sections = {"progressive_layer_drop": DROPS, "clip": 1.0, **more}
    engine = xds.initialize(
        build(feature), config(stage, accumulation=accumulation, samples=SAMPLES, **sections)
    )

    def batch(step: int, micro_step: int) -> torch.Tensor:
        return micro_batch(step, micro_step, SAMPLES * ranks).chunk(ranks)[rank]

    found = train(engine, STEPS, batch)
    values = engine.full_state_dict(rank0_only=False)
    sent = engine.bytes_sent()
    engine.destroy()
    return found, values, sent


def reference(ranks: int, accumulation: int) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """The same in plain PyTorch: a dropped block is left out, and its gradient is zero."""
    model = build("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        total = 0.0
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        for micro_step in range(accumulation):
            tokens = micro_batch(step, micro_step, SAMPLES * ranks)
            x = model.embed(tokens[:, :-1])
            for block, keep in zip(model.blocks, keeps(step, micro_step), strict=True):
                if keep is not None:
                    x = x + (block(x) - x) / keep
            logits = model.head(model.norm(x))
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / accumulation).backward()
            total += loss.item() / accumulation
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((total, norm.item()))
    return found, model.state_dict()


def test_the_choices_have_every_case():
    seen = [keeps(step, 0) for step in range(STEPS)]
    assert seen[0] == [1.0] * DEPTH  # theta is 1 at first
    assert [None] * DEPTH in seen  # all are dropped
    assert any(None in one and one != [None] * DEPTH for one in seen)
    two = zip(keeps(BETWEEN, 0), keeps(BETWEEN, 1), strict=True)
    assert {(True, False), (False, True)} <= {(a is None, b is None) for a, b in two}


def test_the_generator_gives_the_same_numbers_for_ever():
    assert uniform(LAYERS, 7, 3, 2, 1, 3).tolist() == pytest.approx(KNOWN, abs=1e-15)


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 2), (1, 1), (2, 2), (3, 1), (3, 2)])
@pytest.mark.quick("2-2", "3-2")
def test_steps_are_those_of_plain_pytorch_with_the_same_choices(stage, accumulation):
    wanted, values = reference(2, accumulation)
    results = run_ranks(run, 2, stage, accumulation)
    for step, (loss, norm) in enumerate(wanted):
        mean = sum(found[step].loss for found, _, _ in results) / 2
        assert mean == pytest.approx(loss, rel=1e-5)
        assert results[0][0][step].norm == pytest.approx(norm, rel=1e-5)
    assert not differing(results[1][1], values, atol=2e-5)  # Adam divides small gradients


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.quick("0")
def test_a_dropped_block_is_neither_gathered_nor_reduced(stage):
    plain = run_ranks(partial(run, progressive_layer_drop={}), 2, stage, 1)[0][2]
    sent = run_ranks(run, 2, stage)[0][2]
    share = sum(keeps(step, 0).count(None) for step in range(STEPS)) / (STEPS * DEPTH)
    model = build("plain")
    numel = sum(param.numel() for param in model.parameters())
    of_blocks = sum(param.numel() for param in model.blocks.parameters()) / numel
    names = {"reduce_scatter"} | ({"all_gather"} if stage in (0, 3) else set())
    for name in names:  # the rest is that of embedding, head and padding
        assert sent[name] / plain[name] == pytest.approx(1 - share * of_blocks, abs=0.02)


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp16"), (2, "fp32"), (3, "bf16")])
@pytest.mark.quick("2-fp32")
def test_theta_of_one_has_the_bits_of_a_plain_run(stage, precision):
    more = {"precision": precision}
    plain = run_ranks(partial(run, progressive_layer_drop={}, **more), 2, stage, 2)
    one = run_ranks(partial(run, progressive_layer_drop={"enabled": True}, **more), 2, stage, 2)
    for (losses, values, _), (own_losses, own_values, _) in zip(plain, one, strict=True):
        assert own_losses == losses
        assert not differing(own_values, values)


ALSO = {  # a stage, and what else the config or the model has
    "checkpointed by the script": (3, {"feature": "checkpointed"}),
    "reentrant": (3, {"feature": "checkpointed_reentrant"}),
    "recomputed": (0, {"activation_checkpointing": {"enabled": True}}),
    "compiled": (3, {"compile": {"enabled": True, "backend": "aot_eager"}}),
    "joint units": (3, {"zero": {"unit_min_numel": 10**6}}),
    "on the host": (3, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
    "updates under backward": (
        0,
        {"zero": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
    ),
    "no overlap": (0, {"zero": {"overlap_comm": False}}),
    "divergent": (3, {"zero": {"divergent_graphs": True}}),
}


@cache
def without_others(stage: int) -> Any:
    return run_ranks(run, 2, stage, 2)[0]


@pytest.mark.parametrize("case", ALSO)
@pytest.mark.quick("recomputed", "joint units", "on the host")
def test_other_features_drop_the_same_blocks(case):
    stage, more = ALSO[case]
    wanted = without_others(stage)
    found = run_ranks(partial(run, **more), 2, stage, 2)[0]
    assert [step.loss for step in found[0]] == pytest.approx(
        [step.loss for step in wanted[0]], rel=1e-6
    )
    assert not differing(found[1], wanted[1], atol=1e-5)


def test_the_learned_order_keeps_the_place_of_a_dropped_block():
    def orders() -> list[list[str]]:
        engine = xds.initialize(build("plain"), config(3, progressive_layer_drop=DROPS))
        seen = []
        for step in range(STEPS):
            engine.backward(engine(micro_batch(step, 0, 2)))
            engine.step()
            gatherer = engine.internals.param_gatherer
            learned = gatherer._order.with_left_out(gatherer._left_out, gatherer._previous)
            seen.append([unit.name for unit in learned.units])
        engine.destroy()
        return seen

    seen = run_ranks(orders, 2)[0]
    assert all(order == seen[0] for order in seen)


@pytest.mark.parametrize(("stage", "is_between"), [(0, True), (3, False), (3, True)])
@pytest.mark.quick("3-True")
def test_a_resume_at_another_number_of_ranks_goes_on_exactly(tmp_path, stage, is_between):
    ranks = 2 if is_between else 3

    def part(first: bool) -> Any:
        size = 6 // dist.get_world_size()

        def batch(step: int, micro_step: int) -> torch.Tensor:
            return micro_batch(step, micro_step, 6).split(size)[dist.get_rank()]

        def one(step: int, micro_step: int) -> None:
            engine.backward(engine(batch(step, micro_step)))
            engine.step()

        settings = config(stage, samples=size, accumulation=2, progressive_layer_drop=DROPS)
        engine = xds.initialize(build("plain"), settings)
        if first:
            train(engine, BETWEEN, batch)
            if is_between:
                one(BETWEEN, 0)
            engine.save_checkpoint(tmp_path)
        else:
            engine.load_checkpoint(tmp_path)
        if is_between:
            one(BETWEEN, 1)
        train(engine, range(BETWEEN + is_between, 6), batch)
        found = engine.full_state_dict(rank0_only=False), engine.get_pld_theta()
        engine.destroy()
        return found

    wanted, theta = run_ranks(part, 2, True)[0]
    found, resumed = run_ranks(part, ranks, False)[0]
    assert resumed == theta == LayerDrop(THETA, GAMMA).at(6)
    assert not differing(found, wanted, atol=1e-5 if ranks == 3 else 0)


def test_a_pipeline_drops_the_blocks_of_one_process():
    def losses(stages: int, stage: int) -> list[float]:
        more = {"pipeline": {"stages": stages}} if stages > 1 else {}
        settings = config(stage, accumulation=3, progressive_layer_drop=DROPS, **more)
        engine = xds.initialize(build("plain"), settings)
        batches = iter([micro_batch(number, 0, 2) for number in range(3 * STEPS)])
        found = [engine.train_batch(batches).item() for _ in range(STEPS)]
        engine.destroy()
        return found

    wanted = run_ranks(losses, 1, 1, 0)[0]
    for stage in (0, 3):
        assert run_ranks(losses, 2, 2, stage)[0] == pytest.approx(wanted, rel=1e-6)


class Reads(nn.Module):
    """A model with DeepSpeed's keywords; it keeps what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(
        self, x: torch.Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0
    ) -> torch.Tensor:
        self.seen.append((progressive_layer_drop, pld_theta))
        return self.layer(x).square().mean()


class Wraps(nn.Module):
    """A wrapper that passes its keywords on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Reads()

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.inner(x, **kwargs)


@pytest.mark.parametrize("kind", [Reads, Wraps])
def test_a_model_with_the_keywords_gets_theta_in_training(kind):
    def seen() -> list[Any]:
        model = kind()
        engine = xds.initialize(model, config(1, progressive_layer_drop=DROPS))
        assert engine.pld_enabled()
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4)))
            engine.step()
        engine.eval()
        engine(torch.ones(2, 4))
        engine.destroy()
        return getattr(model, "inner", model).seen

    theta = LayerDrop(THETA, GAMMA)
    wanted = [(True, 1.0), (True, theta.at(1)), (True, theta.at(2)), (False, 1.0)]
    assert run_ranks(seen, 1)[0] == wanted


class Tuples(nn.Module):
    """A residual block with a tuple for a result; `extra` is the second part of it."""

    def __init__(self, extra: Any = None, *, in_place: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.extra, self.in_place = extra, in_place

    def forward(self, x: torch.Tensor) -> Any:
        if self.in_place:
            x += self.up(x)
            return x
        return (x + self.up(x), self.extra)


class Stack(nn.Module):
    """Blocks in a list."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return x.square().mean()


def test_blocks_that_return_tuples_are_dropped_also_where_none_has_run_before():
    def losses(passes: int) -> list[float]:
        model = Stack(Tuples(), Tuples(), Tuples())
        head = nn.Sequential(nn.Linear(8, 8), model)
        settings = config(3, progressive_layer_drop={**DROPS, "theta": 1e-9, "blocks": ["Tuples"]})
        engine = xds.initialize(head, settings)
        engine.global_steps = (
            100  # as after a load, where theta is small: the last one is never kept
        )
        state = torch.random.get_rng_state()
        found = []
        for _ in range(passes):
            loss = engine(torch.ones(2, 8))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        assert torch.equal(torch.random.get_rng_state(), state)
        engine.destroy()
        return found

    assert len(run_ranks(losses, 2, 4)[0]) == 4


def changes_shape() -> nn.Module:
    def block(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 8 + width), nn.ReLU())

    return Stack(block(8), block(16))


REFUSED = {
    "no blocks": (lambda: nn.Sequential(nn.Linear(8, 8)), {}, "no list of equal blocks"),
    "no such class": (
        lambda: Stack(Tuples(), Tuples()),
        {"blocks": ["Layer"]},
        "progressive_layer_drop.blocks = ",
    ),
    "no keywords": (
        lambda: Stack(Tuples(), Tuples()),
        {"keywords": True},
        "does not take progressive_layer_drop and pld_theta",
    ),
    "other shapes": (changes_shape, {}, "no residual block"),
    "other tensors": (
        lambda: Stack(Tuples(torch.ones(1)), Tuples(torch.ones(1))),
        {},
        "tensors beside its hidden states",
    ),
    "in place": (
        lambda: Stack(Tuples(in_place=True), Tuples(in_place=True)),
        {},
        "changes its input in place",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_the_first_step(case):
    make, more, said = REFUSED[case]

    def first_forward() -> None:
        engine = xds.initialize(make(), config(0, progressive_layer_drop={**DROPS, **more}))
        engine(torch.ones(2, 8))

    with pytest.raises(AssertionError, match=said):
        run_ranks(first_forward, 1)


def test_keywords_are_refused_in_pipelines_and_where_ranks_would_wait_for_ever():
    def start(stage: int, **more: Any) -> None:
        xds.initialize(Reads(), config(stage, progressive_layer_drop=DROPS, **more))

    with pytest.raises(AssertionError, match="pipeline stages get no keywords"):
        run_ranks(partial(start, accumulation=2, pipeline={"stages": 2}), 2, 0)
    with pytest.raises(AssertionError, match="divergent_graphs to true"):
        run_ranks(start, 2, 3)


@pytest.mark.parametrize("feature", ["compiled", "compiled_blocks"])
def test_what_the_script_has_compiled_is_refused(feature):
    with pytest.raises(AssertionError, match="the script has compiled"):
        run_ranks(run, 1, 0, 1, feature)


@pytest.mark.parametrize("theta", [0, -0.5, 1.5, "0.5", True])
def test_theta_outside_of_its_range_is_refused(theta):
    section = {"enabled": True, "theta": theta}
    with pytest.raises(ConfigError, match="theta"):
        xds.Config.load({"train_batch_size": 1, "progressive_layer_drop": section})


def test_evaluation_runs_all_blocks():
    def outputs() -> list[Any]:
        engine = xds.initialize(build("plain"), config(3, progressive_layer_drop=DROPS))
        plain = build("plain")
        engine.global_steps = 50
        tokens = micro_batch(0, 0, 2)
        engine.eval()
        found = [engine(tokens).item(), plain(tokens).item()]
        engine.destroy()
        return found

    found, wanted = run_ranks(outputs, 2)[0]
    assert found == pytest.approx(wanted, rel=1e-6)
