"""torch.compile from the config: one graph a kind of block, no break, eager's numbers, and all of it undone.

fp32 numbers are bit-equal to the eager engine's with the backend aot_eager, which calls the same kernels;
inductor's own kernels are within 1e-5 relative.
"""

from __future__ import annotations

import copy
import logging
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes, run_ranks
from models import DEPTH, TinyModel, build, micro_batch
from runs import config
from torch import nn

import xds

STEPS, SAMPLES = 4, 4
FEATURES = ("tied_blocks", "reused", "checkpointed")

pytestmark = [
    # torch.compile itself looks at .grad of what is not a leaf, and loads what torch deprecates
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


def config_of(stage: int = 0, world_size: int = 1, **more: Any) -> dict[str, Any]:
    zero = {"stage3_max_reuse_distance": 0}
    return config(stage, samples=SAMPLES // world_size, clip=0.5, zero=zero, **more)


COMPILED: dict[str, Any] = {"compile": {"enabled": True, "backend": "aot_eager"}}


class Counting:
    """A backend that runs the graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def fresh_counters() -> Any:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    return counters


def breaks_of(counters: Any) -> int:
    return sum(counters["graph_break"].values())


def train(model: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """STEPS steps on this rank: losses, norms, parameters, and after each step graphs and breaks."""
    counters = fresh_counters()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine = xds.initialize(model, settings)
    losses, norms, graphs, breaks = [], [], [], []
    for step in range(STEPS):
        loss = engine(micro_batch(step, 0, SAMPLES).chunk(world_size)[rank], rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
        graphs.append(counters["stats"]["unique_graphs"])
        breaks.append(breaks_of(counters))
    engine.destroy()
    params = [param.detach().float().clone() for param in model.parameters()]
    return {"losses": losses, "norms": norms, "params": params, "graphs": graphs, "breaks": breaks}


def both(feature: str, stage: int, more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    eager = config_of(stage, dist.get_world_size(), **more)
    return train(build(feature), eager), train(build(feature), {**eager, **COMPILED})


def both_at_stages(*cases: tuple[int, dict[str, Any]]) -> list[Any]:
    return [both("plain", stage, more) for stage, more in cases]


def both_at_stage_3(*features: str) -> list[Any]:
    return [both(feature, 3, {}) for feature in features]


def check_equal(eager: dict[str, Any], compiled: dict[str, Any]) -> None:
    assert compiled["losses"] == eager["losses"]
    assert compiled["norms"] == eager["norms"]
    assert all(map(torch.equal, compiled["params"], eager["params"]))


def test_stages_0_and_3_have_eager_numbers_one_graph_and_no_break():
    """Also where a forward is recomputed. With other hooks in its graph it would save other tensors."""
    section = {"enabled": True, "cpu_checkpointing": True}
    cases = ((0, {}), (3, {"activation_checkpointing": section}))
    for eager, compiled in run_processes(both_at_stages, 2, *cases)[0]:
        check_equal(eager, compiled)
        assert eager["graphs"] == [0] * STEPS
        assert compiled["graphs"] == [1] * STEPS  # 3 equal blocks, and nothing compiled later
        assert compiled["breaks"] == [0] * STEPS


def shapes_with_inputs_on_the_host(more: dict[str, Any]) -> Any:
    """Batches of several lengths, eager and compiled: losses, and graphs of the compiled run."""
    found, counters = [], fresh_counters()
    section = {"activation_checkpointing": {"enabled": True, "cpu_checkpointing": True}}
    for compiled in ({}, more):
        engine = xds.initialize(build("plain"), {**config_of(1), **section, **compiled})
        losses = []
        for samples in (4, 3, 4, 5):
            loss = engine(micro_batch(0, 0, 6)[:samples], 0)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        found.append(losses)
    return *found, counters["stats"]["unique_graphs"], breaks_of(counters)


@pytest.mark.slow
def test_blocks_are_compiled_inside_of_a_recomputation_that_stores_inputs_on_the_host():
    eager, compiled, graphs, breaks = run_ranks(shapes_with_inputs_on_the_host, 1, COMPILED)[0]
    assert compiled == pytest.approx(eager, rel=1e-6)
    assert graphs and not breaks


@pytest.mark.slow
def test_models_that_differ_compile_without_break_or_late_recompile():
    for eager, compiled in run_processes(both_at_stage_3, 2, *FEATURES)[0]:
        check_equal(eager, compiled)
        assert compiled["breaks"] == [0] * STEPS
        assert compiled["graphs"] == [compiled["graphs"][0]] * STEPS


# ---- one process ---------------------------------------------------------------------------


def step(engine: xds.Engine, number: int = 0) -> float:
    loss = engine(micro_batch(number, 0, SAMPLES))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def test_names_classes_and_state_stay_and_destroy_puts_forwards_back():
    fresh_counters()
    off = xds.initialize(TinyModel(), config_of(compile={"backend": "aot_eager"}))
    step(off)
    assert not off.is_compiled and not fresh_counters()["stats"]["unique_graphs"]
    off.destroy()
    model = TinyModel()
    names, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    engine = xds.initialize(
        model, config_of(activation_checkpointing={"enabled": True}, **COMPILED)
    )
    step(engine)
    assert engine.is_compiled
    assert engine.module is model
    assert list(model.state_dict()) == names
    assert [type(module) for module in model.modules()] == kinds
    engine.destroy()
    assert not engine.is_compiled
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_forward_of_the_instance_is_compiled_and_put_back():
    model = TinyModel()
    block = model.blocks[1]
    own = block.forward = lambda x: 2 * x
    engine = xds.initialize(model, config_of())
    backend = Counting()
    engine.compile(backend)
    step(engine)
    assert backend.graphs == 2  # blocks 0 and 2; and block 1, which has no parameters in its own
    engine.destroy()
    assert block.forward is own


def test_a_deep_copy_of_the_model_runs_on_its_own_parameters():
    engine = xds.initialize(TinyModel().eval(), config_of(**COMPILED))
    tokens = micro_batch(0, 0)
    before = engine(tokens).item()
    twin = copy.deepcopy(engine.module)
    with torch.no_grad():
        for param in twin.blocks.parameters():
            param.zero_()
    assert engine(tokens).item() == before
    assert twin(tokens).item() != before
    engine.destroy()


class Bare(nn.Module):
    """No list of blocks in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        return (self.down(self.up(x).relu()) - x).square().mean()


def bare_steps(stage: int) -> tuple[int, int, list[float]]:
    counters = fresh_counters()
    torch.manual_seed(0)
    engine = xds.initialize(Bare(), {**config_of(stage, dist.get_world_size()), **COMPILED})
    losses = []
    for number in range(3):
        loss = engine(torch.full((2, 8), float(number)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return counters["stats"]["unique_graphs"], breaks_of(counters), losses


def bare_at_all_stages() -> list[Any]:
    return [bare_steps(stage) for stage in (0, 1, 2, 3)]


@pytest.mark.contract
@pytest.mark.slow
def test_a_model_without_blocks_is_compiled_as_a_whole():
    found = run_processes(bare_at_all_stages, 2)[0]
    assert found == [(1, 0, found[0][2])] * 4


class Numbered(nn.Module):
    """A block whose arithmetic depends on its place: no two share a graph."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) / (self.number + 1)


@pytest.mark.slow
def test_more_different_blocks_than_torch_keeps_graphs_for_are_all_compiled():
    model = nn.Sequential(*(Numbered(number) for number in range(9)))
    engine = xds.initialize(model, config_of())
    counters, backend = fresh_counters(), Counting()
    engine.compile(backend)
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 8)).square().mean())
        engine.step()
    with torch.no_grad():
        engine(torch.ones(4, 8))
    assert backend.graphs == 18  # training and evaluation
    assert breaks_of(counters) == 0
    engine.destroy()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor_trains_to_eager_numbers():
    losses = []
    for more in ({}, {"compile": {"enabled": True, "fullgraph": True}}):
        fresh_counters()
        engine = xds.initialize(build("plain"), config_of(**more))
        losses.append([step(engine, number) for number in range(3)])
        engine.destroy()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# ---- engine.compile ------------------------------------------------------------------------


def test_compile_may_be_called_later_and_twice():
    plain = xds.initialize(build("plain"), config_of())
    expected = [step(plain, number) for number in range(3)]
    plain.destroy()
    fresh_counters()
    engine = xds.initialize(build("plain"), config_of())
    backend = Counting()
    losses = [step(engine, 0)]
    engine.compile(backend=backend, compile_kwargs={"dynamic": False})
    engine.compile(backend=backend, compile_kwargs={"dynamic": False})
    engine.compile()
    losses += [step(engine, number) for number in (1, 2)]
    assert backend.graphs == 1
    assert losses == expected
    with pytest.raises(xds.UsageError, match="already compiled with backend"):
        engine.compile(backend="aot_eager")
    engine.destroy()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schedule": [(0, [])]}, "DeepCompile"),
    ({"compiled_autograd_enabled": True}, "hooks"),
    ({"backend": "induktor"}, "induktor.*backends here.*inductor"),
    ({"compile_kwargs": {"fast": True}}, "fast is not one of them"),
    ({"compile_kwargs": {"mode": "fast"}}, "mode must be"),
    ({"compile_kwargs": {"options": {"no_such": 1}}}, "no_such"),
    ({"backend": "aot_eager", "compile_kwargs": {"mode": "max-autotune"}}, "inductor"),
]


def test_what_cannot_be_met_is_refused_and_nothing_is_compiled():
    engine = xds.initialize(TinyModel(), config_of())
    for arguments, reason in REFUSED:
        with pytest.raises(xds.UsageError, match=reason):
            engine.compile(**arguments)
        assert not engine.is_compiled
    engine.destroy()
    with pytest.raises(xds.UsageError, match="destroyed"):
        engine.compile()


def test_a_compiled_model_in_a_compiling_engine_is_named_once(caplog):
    model = TinyModel()
    for block in model.blocks:
        block.compile(backend="eager")
    with caplog.at_level(logging.WARNING, logger="xds"):
        engine = xds.initialize(model, config_of(**COMPILED))
    assert "the script itself compiled" in caplog.text
    assert not any("forward" in block.__dict__ for block in model.blocks)
    assert len(model.blocks) == DEPTH
    engine.destroy()


def test_an_unknown_backend_is_refused_before_the_model_is_touched():
    model = TinyModel()
    weight = model.head.weight.data_ptr()
    with pytest.raises(xds.ConfigError, match="induktor"):
        xds.initialize(model, config_of(compile={"enabled": True, "backend": "induktor"}))
    assert model.head.weight.data_ptr() == weight


def test_arguments_are_those_that_differ_from_torchs_defaults():
    section = {"enabled": True, "mode": "default", "dynamic": False, "kwargs": {"fullgraph": True}}
    loaded = xds.Config.load(config_of(compile=section))
    assert loaded.compile.arguments() == {"dynamic": False, "fullgraph": True}
