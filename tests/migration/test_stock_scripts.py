"""Tests of whole scripts: in DeepSpeed's style, of the guide, and of stock libraries by `xds --as-deepspeed`.

Their losses equal plain PyTorch's or DDP's. Those in DeepSpeed's style were also run with DeepSpeed 0.19.8;
docs/design/migration.md has the figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from forked_launcher import ForkedLauncher
from script_runs import run_script
from torch.utils.data import DataLoader, DistributedSampler
from warm_ranks import warm

SCRIPTS = Path(__file__).parent / "scripts"
GUIDE = Path(__file__).resolve().parents[2] / "examples" / "migration"
ABORTED = 134
CLASSIFIER = {
    "train_batch_size": 8,
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4},
    },
}


def launch(folder: Path, *words: str, codes: tuple[int, ...] = (0,), **variables: str) -> str:
    """What `xds --nproc-per-node 2 *words` prints."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    words = ("--nproc-per-node", "2", *words)
    launcher = ForkedLauncher(words, folder, environment)
    out, err = launcher.communicate(timeout=300)
    assert launcher.returncode in codes, out + err
    return out


def load(name: str) -> ModuleType:
    """The script as a module, for its model and its data."""
    module = ModuleType(name)
    exec(compile((SCRIPTS / name).read_text(), name, "exec"), module.__dict__)
    return module


# -- in DeepSpeed's style ---------------------------------------------------------------------------------


def batches(data: Any, rank: int, size: int) -> Iterator[Any]:
    """What DeepSpeed's loader serves rank `rank` of 2 in the first epoch."""
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=rank)
    return iter(DataLoader(data, size, sampler=sampler))


def rising(lr: float, steps: int) -> list[float]:
    """DeepSpeed's WarmupLR over 4 steps, as it applies to each step: the first two run at the minimum."""
    log4 = torch.log(torch.tensor(4.0, dtype=torch.float64))
    shares = torch.log(torch.arange(1.0, 5.0, dtype=torch.float64)) / log4
    return [0.0, *(lr * shares).tolist(), *[lr] * steps][:steps]


def plain_classifier() -> list[list[float]]:
    """Losses by rank: both ranks' batches in one process."""
    script = load("classifier.py")
    data = script.make_data()
    torch.manual_seed(7)
    net = script.Net()
    options = {"betas": (0.8, 0.999), "eps": 1e-8, "weight_decay": 3e-7}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, **options)
    losses: list[list[float]] = [[], []]
    pairs = zip(batches(data, 0, 4), batches(data, 1, 4), rising(1e-3, 8), strict=True)
    for *both, lr in pairs:
        optimizer.param_groups[0]["lr"] = lr
        for rank, (images, labels) in enumerate(both):
            loss = torch.nn.functional.cross_entropy(net(images), labels)
            losses[rank].append(loss.item())
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name", ["classifier.py", "language_model.py"])
def test_a_script_differs_from_its_original_by_the_import_alone(name: str) -> None:
    lines = [line for line in (SCRIPTS / name).read_text().splitlines() if "xds" in line]
    assert lines == ["import xds.deepspeed as deepspeed"]


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_classifier_from_a_config_file_trains_as_plain_pytorch(
    stage: int, tmp_path: Path
) -> None:
    config = {**CLASSIFIER, "steps_per_print": 4, "zero_optimization": {"stage": stage}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    options = ["--deepspeed", "--deepspeed_config", "ds.json", "--output", "out"]
    printed = launch(tmp_path, str(SCRIPTS / "classifier.py"), *options)
    assert "step 4, " in printed  # progress shows without setting up logging
    for rank, losses in enumerate(plain_classifier()):
        found = json.loads((tmp_path / f"out.{rank}").read_text())
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["lr"] == pytest.approx(1e-3)


def test_a_language_model_with_its_own_optimizer_trains_as_plain_pytorch(tmp_path: Path) -> None:
    options = ["--stage", "3", "--save", "checkpoints", "--output", "out.json"]
    path = str(SCRIPTS / "language_model.py")
    warm(2).run(run_script, path, str(tmp_path), *options)
    found = json.loads((tmp_path / "out.json").read_text())
    script = load("language_model.py")
    data = script.make_data()
    torch.manual_seed(11)
    model = script.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    losses, norms = [], []
    pairs = zip(batches(data, 0, 4), batches(data, 1, 4), strict=True)
    for number, both in enumerate(pairs, start=1):
        each = [model(ids, targets) for ids, targets in both]
        losses.append(sum(loss.item() for loss in each) / 2)
        (sum(each) / 4).backward()
        if number % 2 == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert found["steps"] == 4
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["norms"][1:] == pytest.approx(norms[:3], rel=1e-5)
    assert found["lr"] == pytest.approx(schedule.get_last_lr()[0])
    weight = model.tokens.weight.sum().item()
    assert [found["weight"], found["gathered"]] == pytest.approx([weight] * 2, rel=1e-5)
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step4"


# -- of docs/migration.md ---------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["loop.py", "trainer.py", "accelerated.py"])
def test_no_script_of_the_guide_imports_xds(script: str) -> None:
    lines = (GUIDE / script).read_text().splitlines()
    assert not [line for line in lines if "import" in line and "xds" in line]


@pytest.mark.slow
def test_the_loop_of_the_guide_runs_by_the_command_alone(tmp_path: Path) -> None:
    args = ["--deepspeed_config", str(GUIDE / "loop.json")]
    printed = launch(tmp_path, "--as-deepspeed", str(GUIDE / "loop.py"), *args)
    assert "stands in for deepspeed; stage 3, 2 ranks, fp32" in printed
    assert "loss " in printed.splitlines()[-1]


SCHEDULE = {"max_train_batch_size": 64, "micro_batch_sizes": [4], "min_gpus": 1, "max_gpus": 8}
REMOVED: dict[str, dict[str, Any]] = {  # DeepSpeed 0.19.8 refuses each of these files
    "1-bit": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 5}}},
    "1-bit LAMB": {"optimizer": {"type": "OneBitLamb", "params": {"lr": 1e-3, "freeze_step": 5}}},
    "MiCS": {"zero_optimization": {"stage": 3, "mics_shard_size": 1}},
    "elastic": {"elasticity": {"enabled": True, "version": 0.1, **SCHEDULE}},
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", REMOVED)
def test_the_loop_of_the_guide_trains_with_what_deepspeed_has_removed(
    feature: str, tmp_path: Path
) -> None:
    config = json.loads((GUIDE / "loop.json").read_text())
    config |= {"zero_optimization": {"stage": 1}, **REMOVED[feature]}
    if feature == "elastic":  # it sets the batch sizes
        del config["train_micro_batch_size_per_gpu"]
    (tmp_path / "ds.json").write_text(json.dumps(config))
    script = str(GUIDE / "loop.py")
    printed = launch(tmp_path, "--as-deepspeed", script, "--deepspeed_config", "ds.json")
    last = printed.splitlines()[-1].split()
    assert last[0] == "loss" and 10 < float(last[1]) < 30  # 32 squares of N(0, 1): 32 at the start


def assert_loss_of_ddp(folder: Path, script: str, stage: int, *args: str) -> None:
    """The last line of the script on plain DDP, without xds in its ranks.

    There torch 2.13 sometimes aborts a rank after Python has ended (no Python frame, "terminate called
    without an active exception"): the loss has been printed by then.
    """
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    config = json.loads((GUIDE / "zero3.json").read_text())
    config["zero_optimization"]["stage"] = stage
    (folder / "config.json").write_text(json.dumps(config))
    ours = launch(folder, "--as-deepspeed", str(GUIDE / script), *args)
    assert f"stands in for deepspeed; stage {stage}, 2 ranks, fp32" in ours
    codes = (0, ABORTED)
    ddp = launch(folder, str(GUIDE / script), codes=codes, ACCELERATE_USE_CPU="1").splitlines()
    assert ours.splitlines()[-1] == ddp[-1] and ddp[-1].startswith("loss ")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares with DDP on CPUs")
def test_stock_transformers_trainer_gives_the_loss_of_ddp(tmp_path: Path) -> None:
    assert_loss_of_ddp(tmp_path, "trainer.py", 3, "--deepspeed", "config.json")


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares with DDP on CPUs")
def test_stock_accelerate_shards_gradients_with_the_loss_of_ddp(tmp_path: Path) -> None:
    assert_loss_of_ddp(tmp_path, "accelerated.py", 2, "--stage", "2")


# -- of stock libraries -----------------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.slow
def test_stock_transformers_builds_trains_saves_and_resumes(tmp_path: Path) -> None:
    """What its own tests of DeepSpeed ask."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = str(SCRIPTS / "transformers_stock.py")
    printed = launch(tmp_path, "--as-deepspeed", script, str(tmp_path))
    found = json.loads(printed.splitlines()[-1])
    assert found["dtypes"] == ["torch.bfloat16"]  # as the config says, from construction on
    assert found["resized"] == [70, 8]
    assert found["head"] == [[-100.0], [100.0]]  # drawn by the model, for weights that no file has
    assert found["again"] == found["losses"] and len(found["losses"]) == 4
    assert found["apart"] == 0  # model.safetensors has the rounded values of the fp32 weights
    # each of the two Trainers says who trains, on rank 0, in transformers' own log level too
    assert printed.count("stands in for deepspeed; stage 3, 2 ranks, bf16\n") == 2
    assert printed.count("DeepSpeed info: version=0.19.8+xds; xds ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["grpo", "rloo", "online_dpo"])
def test_stock_trl_has_the_rewards_of_stage_0_at_stage_3(trainer: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    script = str(SCRIPTS / "trl_stock.py")
    found = [
        json.loads(launch(tmp_path, "--as-deepspeed", script, trainer, stage).splitlines()[-1])
        for stage in ("0", "3")
    ]
    assert len(set(found[0]["rewards"][0])) > 3
    assert found[1]["rewards"] == found[0]["rewards"]
    assert found[1]["losses"] == pytest.approx(found[0]["losses"], abs=1e-6)


@pytest.mark.slow
def test_lightnings_fabric_and_trainer_train_as_ddp_does_at_stages_1_to_3(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    printed = launch(tmp_path, "--as-deepspeed", str(SCRIPTS / "lightning_stock.py"))
    found = json.loads(printed.splitlines()[-1])
    for name in ("fabric", "trainer"):
        ddp, *stages = found[name]
        assert ddp[-1] < 0.7 * ddp[0]
        for losses in stages:
            assert losses == pytest.approx(ddp, rel=1e-5)
    assert found["threads"] == []  # 20 s after the end of the process group


@pytest.mark.slow
def test_a_script_of_inference_generates_as_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = launch(tmp_path, "--as-deepspeed", str(SCRIPTS / "inference_stock.py"))
    assert out.count("rank 0: equal True") == 4 and "equal False" not in out
    assert "dtype" in out and "stands in for deepspeed" in out
