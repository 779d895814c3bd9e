"""accelerate beside the stand-in: what it asks of the layer, ignored plugins, its launch, and unused runs."""

from __future__ import annotations

import copy
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer import on_ranks, start
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import xds
from xds import deepspeed
from xds.deepspeed.runtime.pipe.engine import PipelineEngine
from xds.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from xds.deepspeed.utils import groups, set_z3_leaf_modules, z3_leaf_module
from xds.engine.deepspeed import accelerate
from xds.engine.deepspeed.stand_in import AliasFinder

# as accelerate's class does: it asks for the version before it makes its state
ACCELERATOR = """
def __init__(ask, cpu, deepspeed_plugins):
    ask()
"""


class Named:
    name = "deepspeed"


def ask() -> None:
    list(AliasFinder().find_distributions(Named()))


def make_accelerator(cpu: bool, plugin: Any) -> None:
    names: dict[str, Any] = {"__name__": "accelerate.accelerator"}
    exec(ACCELERATOR, names)
    names["__init__"](ask, cpu, plugin)


# -- its state and its plugin -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_counted", "later", "plugin", "cpu", "world_size", "counts_again"),
    [
        (1, {}, "a plugin", False, "2", True),
        (1, {}, {"teacher": "a plugin"}, False, "2", True),
        (2, {}, "a plugin", False, "2", False),
        (1, {"num_processes": 1}, "a plugin", False, "2", False),
        (1, {}, None, False, "2", False),
        (1, {}, "a plugin", True, "2", False),
        (1, {}, "a plugin", False, "1", False),
    ],
)
def test_ranks_are_counted_again_for_an_accelerator_with_a_plugin(
    num_counted: int,
    later: dict[str, Any],
    plugin: Any,
    cpu: bool,
    world_size: str,
    counts_again: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The dictionary that all PartialStates share is emptied: accelerate fills it again."""
    shared = {"num_processes": num_counted, "backend": None}
    state: Any = ModuleType("accelerate.state")
    state.PartialState = SimpleNamespace(_shared_state=shared)
    state.AcceleratorState = SimpleNamespace(_shared_state=later)
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": ""}
    for name, value in (variables | {"WORLD_SIZE": world_size, "RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, "xds"):
        make_accelerator(cpu, plugin)
    assert (shared == {}) is counts_again
    assert ("counts 2 from here on" in caplog.text) is counts_again


@pytest.mark.parametrize(
    ("cpu", "variable", "plugin", "cause"),
    [
        (True, "", "a plugin", "cpu=True"),
        (False, "1", "a plugin", "ACCELERATE_USE_CPU"),
        (False, "", "a plugin", None),
        (True, "1", None, None),
    ],
)
def test_a_plugin_that_accelerate_ignores_is_said_once(
    cpu: bool,
    variable: str,
    plugin: str | None,
    cause: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", variable)
    accelerate._say_ignored.cache_clear()
    with caplog.at_level(logging.WARNING, "xds"):
        for _ in range(2):
            make_accelerator(cpu, plugin)
        ask()  # not from an Accelerator
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (cause is not None)
    assert cause is None or (f"because {cause} is set" in said[0] and "trains with DDP" in said[0])


def test_a_run_that_trained_without_deepspeed_is_told_at_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, world_size, rank, said in (
        ("NO", "2", "0", "each rank alone"),
        ("MULTI_GPU", "2", "0", "MULTI_GPU"),
        ("DEEPSPEED", "2", "0", ""),
        ("NO", "1", "0", ""),
        ("NO", "2", "1", ""),
        (None, "2", "0", ""),
    ):
        state: Any = ModuleType("accelerate.state")
        shared = {} if kind is None else {"distributed_type": SimpleNamespace(name=kind)}
        state.AcceleratorState = SimpleNamespace(_shared_state=shared)
        monkeypatch.setitem(sys.modules, "accelerate.state", state)
        monkeypatch.setenv("WORLD_SIZE", world_size)
        monkeypatch.setenv("RANK", rank)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "xds"):
            accelerate.warn_of_unused()
        assert bool(caplog.records) is bool(said)
        assert said in caplog.text


ENDS = """
import sys
from types import ModuleType, SimpleNamespace
from xds.engine.deepspeed import stand_in

stand_in.activate()
state = sys.modules["accelerate.state"] = ModuleType("accelerate.state")
state.AcceleratorState = SimpleNamespace(_shared_state={"distributed_type": SimpleNamespace(name="NO")})
if sys.argv[1] == "used":
    stand_in.engine_was_made()
"""


@pytest.mark.parametrize("how", ["used", "unused"])
def test_a_run_that_made_an_engine_is_not_told(how: str) -> None:
    environment = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    command = [sys.executable, "-c", ENDS, how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert ("each rank alone" in done.stderr) == (how == "unused")


# -- its launch -------------------------------------------------------------------------------------------


def test_accelerate_launch_finds_a_command_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in its process, only with the stand-in, and only where there is no such command."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    accelerate.put_command_on_path()
    assert shutil.which("deepspeed") is None
    monkeypatch.setitem(sys.modules, accelerate.LAUNCHED, ModuleType(accelerate.LAUNCHED))
    accelerate.put_command_on_path()
    found = shutil.which("deepspeed")
    assert found is not None
    done = subprocess.run([found, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "--hostfile" in done.stdout
    accelerate.put_command_on_path()
    assert shutil.which("deepspeed") == found


class DummyOptim:
    """Has the name of accelerate's placeholder."""


class DummyScheduler:
    """Has the name of accelerate's placeholder."""


def test_a_placeholder_of_accelerate_outside_prepare_is_one_sentence() -> None:
    for given in ({"optimizer": DummyOptim()}, {"lr_scheduler": DummyScheduler()}):
        with pytest.raises(xds.UsageError, match="only goes to accelerator.prepare; leave .* out"):
            deepspeed.initialize(model=nn.Linear(2, 2), config={}, **given)


# -- what it asks of an engine ----------------------------------------------------------------------------


@on_ranks(1)
def test_what_accelerate_reads_of_an_engine() -> None:
    """Its get_state_dict raises where the key is false. Where the key is absent, weights are gathered."""
    key = "stage3_gather_16bit_weights_on_model_save"
    for zero, expected in (({key: False}, False), ({key: True}, True), ({}, True)):
        engine = start(nn.Linear(4, 4), 3, zero=zero)
        assert engine.zero_gather_16bit_weights_on_model_save() is expected
    fp16 = {"enabled": True, "initial_scale_power": 16}
    engine = start(nn.Linear(4, 4), 2, fp16=fp16)
    assert engine.get_global_grad_norm() is None and type(engine) is deepspeed.DeepSpeedEngine
    # the gradient of an fp16 loss is its scale, 65536, which is no fp16 number: the step is skipped
    engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).mean())
    engine.step()
    assert engine.get_global_grad_norm() == engine.optimizer._global_grad_norm == math.inf
    assert engine.optimizer.overflow
    assert issubclass(PipelineEngine, deepspeed.DeepSpeedEngine)


# as accelerate's class does below stage 3, on every rank
GET_STATE_DICT = """
def get_state_dict(self, model):
    return clone(model.module.state_dict())
"""


@on_ranks(2)
def test_accelerate_gets_whole_experts_below_stage_3() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "vocab_size": 20}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    engine = start(model, 2, expert_parallel={"enabled": True, "autoep_size": 2})
    names: dict[str, Any] = {
        "__name__": "accelerate.accelerator",
        "clone": deepspeed.checkpoint.utils.clone_tensors_for_torch_save,
    }
    exec(GET_STATE_DICT, names)
    found = names["get_state_dict"](None, engine)
    if dist.get_rank():
        assert found is None
    else:
        assert found.keys() == whole.keys()
        assert all(value.equal(whole[name]) for name, value in found.items())


def test_a_common_config_and_a_reference_model_start_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A key without effect is no warning here: almost each of DeepSpeed's configs has one."""
    zero = {"sub_group_size": 1e9, "offload_param": {"device": "none"}}
    config: dict[str, Any] = {"train_batch_size": 1, "zero_optimization": {"stage": 3, **zero}}
    for more in ({"optimizer": {"type": "AdamW"}}, {}):
        deepspeed.initialize(model=nn.Linear(4, 4), config=config | more)[0].destroy()
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_a_leaf_module_says_so_itself_and_so_does_its_copy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    set_z3_leaf_modules(model, [nn.Linear])
    for one in (model, copy.deepcopy(model)):
        assert one[0]._z3_leaf and z3_leaf_module(one[0]) and not z3_leaf_module(one[1])


def build() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


@on_ranks(2, processes=True)
def test_disable_in_eval_takes_whole_batches_of_each_rank_after_eval() -> None:
    """accelerate always passes it. In training a batch is cut."""
    pytest.importorskip("transformers")
    mpu = UlyssesSPAttentionHF.register_with_transformers("x", "sdpa", 2, 1, disable_in_eval=True)
    plain, model = build(), build()
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    rank = groups._get_sequence_parallel_rank()
    ids = torch.arange(8).view(1, 8)
    own = slice(rank * 4, rank * 4 + 4)
    engine.train()
    cut = engine(input_ids=ids[:, own], position_ids=ids[:, own]).logits
    assert (cut - plain(ids).logits[:, own]).abs().max().item() < 1e-6
    engine.eval()
    mine = (ids + dist.get_rank()) % 32  # each rank has a batch of its own, without position_ids
    assert (engine(input_ids=mine).logits - plain(mine).logits).abs().max().item() < 1e-6
    engine.destroy()


# -- optimizers without a schedule, which an example of accelerate calls ----------------------------------


class Averaging(torch.optim.SGD):
    """Evaluates values that are 1 above those that it trains."""

    def eval(self) -> None:
        self._add(1.0)

    def train(self) -> None:
        self._add(-1.0)

    @torch.no_grad()
    def _add(self, number: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(number)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (1, "fp32"), (3, "fp32"), (2, "bf16")]
)
@on_ranks(2)
def test_the_values_to_evaluate_reach_the_parameters_of_all_ranks(
    stage: int, precision: str
) -> None:
    """What the model computes while it trains, evaluates and trains again; and after one step."""
    plain, model = net(), net()
    expected_of = Averaging(plain.parameters(), lr=0.1)
    optimizer = Averaging(model.parameters(), lr=0.1)
    more = {"zero_allow_untested_optimizer": True, "gradient_clipping": 1.0}
    engine = start(model, stage, precision, optimizer=optimizer, **more)
    shown, x = engine.optimizer, torch.ones(1, 3)
    found, expected = [], []

    def note() -> None:
        with torch.no_grad():
            found.append(engine(x.to(next(model.parameters()).dtype)).item())
            expected.append(plain(x).item())

    for switch in ("", "eval", "train"):
        if switch:
            getattr(shown, switch)()
            getattr(expected_of, switch)()
        note()
    engine.backward(engine(x.to(next(model.parameters()).dtype)).mean())
    engine.step()
    plain(x).mean().backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    expected_of.step()
    note()
    assert not hasattr(shown, "evaluate")
    is_bf16 = precision == "bf16"
    assert found == pytest.approx(expected, rel=2e-2 if is_bf16 else 1e-5, abs=1e-2 * is_bf16)
