"""State dicts, weights from files, states away from the device, and what a sharded model refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes, run_ranks
from models import TinyModel, build, micro_batch
from runs import config
from torch import Tensor, nn

import xds
from xds import zero
from xds.launcher.checkpoint import main as checkpoint_command
from xds.zero.construction.sources import Weights
from xds.zero.features.host_copies import HostCopies
from xds.zero.model.state_memory import StateMemory


def batch(step: int) -> Tensor:
    rank = dist.get_rank()
    return micro_batch(step, 0, 6)[2 * rank : 2 * rank + 2]


def train(engine: xds.Engine, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(batch(step)))
        engine.step()


def whole_state(stage: int, precision: str) -> None:
    engine = xds.initialize(build("tied"), config(stage, precision))
    plain = build("tied").state_dict()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    state = engine.state_dict()
    assert list(state) == list(plain)
    assert all(state[name].equal(plain[name].to(dtype)) for name in plain)
    assert state["head.weight"] is state["embed.weight"]
    assert bool(engine.full_state_dict()) == (dist.get_rank() == 0)
    train(engine, 3)
    masters = engine.full_state_dict(rank0_only=False, full_precision=True)
    assert masters["norm.weight"].dtype == torch.float32
    other = xds.initialize(build("tied"), config(stage, precision))
    other.load_state_dict(masters)
    copied = other.full_state_dict(rank0_only=False, full_precision=True)
    assert all(copied[name].equal(masters[name]) for name in masters)
    assert other(batch(9)).item() == engine(batch(9)).item()


def at_every_stage(check: str) -> None:
    for stage, precision in ((0, "fp32"), (2, "bf16"), (3, "bf16")):
        globals()[check](stage, precision)


def test_a_whole_state_dict_goes_out_and_comes_in() -> None:
    run_ranks(at_every_stage, 3, "whole_state")


def away_and_back(stage: int, precision: str) -> None:
    engine = xds.initialize(build("plain"), config(stage, precision))
    twin = xds.initialize(build("plain"), config(stage, precision))
    for one in (engine, twin):
        train(one, 2)
    engine.offload_states(include=["optim_states"])
    for call in (lambda: engine(batch(0)), engine.state_dict):
        with pytest.raises(xds.UsageError, match=r"are offloaded: call reload_states\(\) first"):
            call()
    engine.reload_states()
    # on a CPU nothing moves by itself: here it does
    sharded, states = engine._sharded, StateMemory(engine._parts.updater)
    tensors = [*states.state_tensors(), *states.master_tensors(), *sharded.memory.param_tensors()]
    sharded.before_update()
    sharded.memory.hide_whole_params(True)
    sharded.memory.release_gradients()
    host_copies = HostCopies(pin_memory=False)
    host_copies.move_to_host(tensors)
    assert host_copies.held_bytes > 0
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0
    assert all(param.isnan().all() for param in engine.module.parameters())
    host_copies.move_back()
    sharded.memory.show_whole_params()
    for one in (engine, twin):
        train(one, 2)
    assert engine(batch(9)).item() == twin(batch(9)).item()
    engine.backward(engine(batch(3)))
    with pytest.raises(xds.UsageError, match="while gradients wait for a step"):
        engine.offload_states()
    with pytest.raises(xds.UsageError, match=r"there is no such state; choose from optim_states"):
        twin.offload_states(include=["weights"])


def test_states_go_to_the_host_and_come_back() -> None:
    run_ranks(at_every_stage, 2, "away_and_back")


def refusals(stage: int, precision: str) -> None:
    model = build("tied")
    engine = xds.initialize(model, config(stage, precision))
    if stage == 3:
        with pytest.raises(xds.UsageError, match=r"call engine.state_dict\(\)"):
            model.state_dict()
        with pytest.raises(xds.UsageError, match=r"call engine.load_state_dict\(...\)"):
            model.load_state_dict(build("tied").state_dict())
    with pytest.raises(xds.UsageError, match="TinyModel.head = Linear, after xds.initialize"):
        model.head = nn.Linear(24, 61)
    with pytest.raises(xds.UsageError, match="TinyModel.extra = a parameter"):
        model.extra = nn.Parameter(torch.zeros(3))
    model.dropout = nn.Dropout(0.0)  # has nothing to train
    model.head.weight = model.embed.weight  # is what it was
    train(engine, 1)
    engine.destroy()
    model.extra = nn.Parameter(torch.zeros(3))
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_changes_that_would_be_lost_are_refused_where_they_are_made() -> None:
    run_ranks(at_every_stage, 2, "refusals")


def from_files(folder: str, stage: int) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    torch.manual_seed(99)
    source = TinyModel("tied")
    state = {name: value for name, value in source.state_dict().items() if name != "head.weight"}
    path = Path(folder)
    if dist.get_rank() == 0:
        names = sorted(state)
        parts = {
            "a.safetensors": names[: len(names) // 2],
            "b.safetensors": names[len(names) // 2 :],
        }
        for file, part in parts.items():
            save_file({name: state[name] for name in part}, path / file)
        table = {name: file for file, part in parts.items() for name in part}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
        torch.save(source.state_dict(), path / "weights.bin")
    dist.barrier()

    def check(model: nn.Module) -> None:
        for param, other in zip(model.parameters(), source.parameters(), strict=True):
            assert zero.get_full_param(param).equal(other)

    with torch.device("meta"):
        model = build("tied")
    model.head.weight = model.embed.weight
    engines = [xds.initialize(model, config(stage), weights=path)]
    check(model)
    with zero.Init(config(stage)):
        model = build("tied")
    zero.load_weights(model, source.state_dict())
    engines.append(xds.initialize(model, config(stage)))
    check(model)
    model = build("tied")
    engines.append(xds.initialize(model, config(stage)))
    zero.load_weights(model, path / "weights.bin")
    check(model)
    assert len({engine(batch(0)).item() for engine in engines}) == 1

    wrong = {**source.state_dict(), "stranger": torch.zeros(2), "norm.bias": torch.zeros(3)}
    del wrong["norm.weight"]
    with pytest.raises(xds.UsageError) as caught:
        zero.load_weights(model, wrong)
    for part in (
        "nothing was changed; shapes differ: norm.bias is (3,), in the model (24,)",
        "missing in the weights: norm.weight",
        "not in the model: stranger",
    ):
        assert part in str(caught.value)
    assert str(caught.value).endswith("strict=False ignores missing and extra names")
    with pytest.raises(xds.UsageError, match="leave out weights= and call xds.zero.load_weights"):
        xds.initialize(build("tied"), config(stage), weights=wrong)
    check(model)
    for source_path, match in (
        (path / "nowhere", "does not exist"),
        (path.parent, "holds none of"),
    ):
        with pytest.raises(xds.UsageError, match=match):
            zero.load_weights(model, source_path)


def test_weights_are_loaded_from_outside(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    run_processes(from_files, 2, str(folder), 3)


def from_big_file(folder: str) -> None:
    path = Path(folder) / "model.safetensors"
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 1024, bias=False), nn.Linear(64, 1024, bias=False))
    xds.initialize(model, config(3), weights=path)


def test_a_rank_reads_its_own_part_of_a_file_only(tmp_path: Path, monkeypatch: Any) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    weights = {"0.weight": torch.randn(1024, 64), "1.weight": torch.randn(1024, 64)}
    save_file(weights, tmp_path / "model.safetensors")
    counts, read = [0] * 4, Weights.read

    def counting(weights: Weights, name: str, start: int, stop: int) -> Tensor:
        counts[dist.get_rank()] += stop - start
        return read(weights, name, start, stop)

    monkeypatch.setattr(Weights, "read", counting)
    run_ranks(from_big_file, 4, str(tmp_path))
    assert counts == [2 * 1024 * 64 // 4] * 4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def long_work(folder: str) -> None:
    packing = {"tokens": 8, "columns": {"input_ids": 0}}
    engine = xds.initialize(
        build("plain"),
        config(3, data_packing=packing),
        training_data=[[token] * 5 for token in range(40)],
    )
    engine.full_state_dict()
    engine.weights().save(folder)
    next(iter(engine.training_dataloader))
    engine.save_checkpoint(folder)


def test_long_work_has_a_progress_bar_on_rank_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bars = ("gathering weights:", "writing weights:", "packing:", "export:", "verify:")
    for delay_seconds, is_terminal in ((0.0, True), (2.0, True), (0.0, False)):
        screen = Terminal() if is_terminal else io.StringIO()
        monkeypatch.setattr("sys.stderr", screen)
        monkeypatch.setattr("xds.utils.progress.DELAY_SECONDS", delay_seconds)
        folder = str(tmp_path / f"{delay_seconds} {is_terminal}")
        run_ranks(long_work, 2, folder)
        assert checkpoint_command(["verify", folder]) == 0
        assert checkpoint_command(["export", folder, f"{folder}/out", "--to", "torch"]) == 0
        shown = [screen.getvalue().count(f"{bar}   0%") for bar in bars]
        assert shown == [int(delay_seconds == 0 and is_terminal)] * len(bars)
