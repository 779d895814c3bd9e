"""Values of experts on several ranks: checkpoints, exports, weights of files, and models built in parts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import run_processes, run_ranks
from manifest_damages import rewrite
from random_loads import Cut, compare, engine_of, random_loads, save, values_of
from runs import config
from test_shared_experts import MODELS, batch
from torch import Tensor, nn

import xds
from xds.launcher.cli import main
from xds.zero.construction.sources import Weights

transformers.logging.disable_progress_bar()


def section(size: int) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, "autoep_size": size}} if size else {}


# -- checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_experts_load_at_any_cut(tmp_path: Path) -> None:
    cuts = [Cut(1, 4, 2, 2), Cut(2, 2, 2, 1, precision="bf16"), Cut(1, 2, 0, 3)]
    saved = [save(str(tmp_path), cut) for cut in cuts]
    for cut in (Cut(1, 4, 4, 3), Cut(2, 2, 1, 1), cuts[2]):
        assert compare(str(tmp_path), cut, saved) == []
    assert compare(str(tmp_path), cuts[0], saved, module_only=True) == []


@pytest.mark.slow
def test_random_cuts_load_at_random_cuts(tmp_path: Path) -> None:
    assert list(random_loads(str(tmp_path), 20, seed=1)) == [[]] * 4


def save_in_a_step(folder: str, cut: Cut) -> None:
    engine = engine_of(cut, seed=0)
    engine.backward(engine(*next(iter(engine.training_dataloader))))
    engine.step()
    engine.save_checkpoint(folder, "it")
    engine.destroy()


def load_in_a_step(folder: str, cut: Cut) -> str:
    engine = engine_of(cut, seed=0)
    try:
        engine.load_checkpoint(folder, "it")
    except xds.UsageError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_a_partial_step_needs_the_same_ranks_of_experts(tmp_path: Path) -> None:
    run_ranks(save_in_a_step, 4, str(tmp_path), Cut(1, 4, 2, 2))
    assert run_ranks(load_in_a_step, 4, str(tmp_path), Cut(1, 4, 2, 2)) == [""] * 4
    for text in run_ranks(load_in_a_step, 4, str(tmp_path), Cut(1, 4, 4, 2)):
        assert "by 4 ranks, 2 of which share the experts of a layer, with grad" in text


def test_manifests_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = Cut(1, 4, 2, 1)
    saved = save(str(tmp_path), cut)
    folder = tmp_path / cut.tag
    assert main(["checkpoint", "info", str(folder)]) == 0
    assert "ranks that share experts  2" in capsys.readouterr().out
    for value in (0, 3, 8, -1, "2"):
        rewrite(folder, lambda raw, value=value: raw.update(experts=value))
        assert main(["checkpoint", "verify", str(folder)]) == 1
        assert "experts" in capsys.readouterr().err
    rewrite(folder, lambda raw: raw.update(experts=2))
    assert compare(str(tmp_path), Cut(1, 2, 2, 1), [saved]) == []
    older = save(str(tmp_path), Cut(1, 2, 0, 1))
    rewrite(tmp_path / older.cut.tag, lambda raw: raw.pop("experts"))
    assert compare(str(tmp_path), Cut(1, 4, 2, 3), [older]) == []


# -- exports ------------------------------------------------------------------------------------------------


def train_and_save(folder: str, name: str) -> tuple[dict[str, Tensor], Tensor]:
    engine = xds.initialize(MODELS[name](), config(3, **section(2)))
    ids = batch(0, dist.get_rank())
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(folder)
    values = engine.full_state_dict(rank0_only=False)
    with torch.no_grad():
        logits = engine.eval()(input_ids=batch(1, 0)).logits
    engine.destroy()
    return values, logits


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.quick("gpt_oss")
def test_an_export_is_read_by_from_pretrained(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    values, logits = run_ranks(train_and_save, 4, str(tmp_path / "in"), name)[3]
    assert (
        main(["checkpoint", "export", "--to", "safetensors", str(tmp_path / "in"), str(out)]) == 0
    )
    kind = type(MODELS[name]())
    MODELS[name]().config.save_pretrained(out)
    model, loading = kind.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not any(loading.values()), loading
    assert all(torch.equal(values[key], value) for key, value in model.state_dict().items())
    torch.testing.assert_close(model(input_ids=batch(1, 0)).logits, logits)


# -- weights of files ---------------------------------------------------------------------------------------


class Reads:
    """Elements of experts that each rank has read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numel = Counter[int]()
        read = Weights.read

        def counted(weights: Weights, name: str, start: int, stop: int) -> Tensor:
            self.numel[dist.get_rank()] += (stop - start) * ("experts" in name)
            return read(weights, name, start, stop)

        monkeypatch.setattr(Weights, "read", counted)


def load(name: str, folder: str, stage: int, size: int, is_late: bool, stages: int) -> Any:
    sections = section(size) | {"pipeline": {"stages": stages}}
    with torch.device("cpu" if is_late else "meta"):
        model = MODELS[name]()
    given = config(stage, accumulation=stages, **sections)
    engine = xds.initialize(model, given, weights=None if is_late else folder)
    if is_late:
        xds.zero.load_weights(engine.module, folder)
    values = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return values


@pytest.mark.parametrize("is_old", [False, True], ids=["stacked", "one file tensor an expert"])
@pytest.mark.parametrize(
    ("ranks", "stage", "size", "is_late", "stages"),
    [(2, 2, 2, False, 1), (4, 3, 2, False, 1), (2, 3, 2, True, 1), (4, 1, 2, False, 2)],
)
@pytest.mark.quick("2-3-2-True-1-stacked", "4-1-2-False-2-one file tensor an expert")
def test_a_rank_reads_its_own_experts(
    ranks: int,
    stage: int,
    size: int,
    is_late: bool,
    stages: int,
    is_old: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(1)
    model = MODELS["mixtral"]()
    for param in model.parameters():
        nn.init.normal_(param)
    model.save_pretrained(tmp_path, save_original_format=is_old)
    reads = Reads(monkeypatch)
    values = run_ranks(load, ranks, "mixtral", str(tmp_path), stage, size, is_late, stages)
    numel = sum(value.numel() for name, value in model.state_dict().items() if "experts" in name)
    shares = size * stages * (ranks // size // stages if stage == 3 else 1)
    assert {reads.numel[rank] for rank in range(ranks)} == {numel // shares}
    for of_rank in values:
        assert all(torch.equal(of_rank[key], value) for key, value in model.state_dict().items())


def test_renamed_weights_load(tmp_path: Path) -> None:
    """transformers writes other names than the model has."""
    given = transformers.GPTNeoXConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = transformers.GPTNeoXForCausalLM(given)
    model.save_pretrained(tmp_path)
    engine = xds.initialize(transformers.GPTNeoXForCausalLM(given), config(0))
    xds.zero.load_weights(engine.module, tmp_path)
    values = engine.state_dict()
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    engine.destroy()
    other = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**given.to_diff_dict() | {"hidden_size": 16})
    )
    with pytest.raises(
        xds.UsageError, match=r"shapes differ: gpt_neox.embed_in.weight is \(61, 32\)"
    ):
        xds.zero.load_weights(other, tmp_path)


# -- models that are built in parts -------------------------------------------------------------------------


def build(stage: int, size: int) -> Any:
    with torch.device("meta"):
        model = MODELS["mixtral"]()
    torch.manual_seed(0)
    engine = xds.initialize(model, config(stage, **section(size)))
    values = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return values


@pytest.mark.parametrize("stage", [2, 3])
def test_experts_of_a_model_on_meta_have_the_values_of_one_rank(stage: int) -> None:
    wanted = run_ranks(build, 1, stage, 0)[0]
    for values in run_ranks(build, 4, stage, 2):
        assert all(torch.equal(values[name], value) for name, value in wanted.items())


@pytest.mark.slow
def test_experts_of_a_model_that_init_has_sharded() -> None:
    plain, sharded = run_processes(values_of, 2, Cut(1, 2, 2, 3))[1]
    assert all(torch.equal(sharded[name], value) for name, value in plain.items())
