"""Configs collected from DeepSpeed's users: with "auto" filled as Trainer does, each resolves.

Refused are only those that ask for a feature that xds does not have. The files are those of ../shared/configs;
where that folder is missing the tests are skipped.
"""

from pathlib import Path

import pytest

import xds
from xds.engine.config.config import parse_config

FOLDER = Path(__file__).parents[3] / "shared" / "configs"
FILES = sorted(FOLDER.glob("*.json"))
WIDTH = 768
FILLED = {  # by transformers' Trainer, from TrainingArguments and the model's width
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 1,
    "scheduler.params.total_num_steps": 1000,
    "fp16.enabled": False,
    "bf16.enabled": True,
    "zero_optimization.reduce_bucket_size": WIDTH * WIDTH,
    "zero_optimization.stage3_prefetch_bucket_size": 0.9 * WIDTH * WIDTH,
    "zero_optimization.stage3_param_persistence_threshold": 10 * WIDTH,
}
NOT_BUILT = {
    "compile.deepcompile": 1,
}

pytestmark = [pytest.mark.contract, pytest.mark.skipif(not FILES, reason=f"no configs in {FOLDER}")]


def complaints(path: Path, **filled: object) -> list[str]:
    try:
        parse_config(path, auto={**FILLED, **filled}, one_replica=True)
    except xds.ConfigError as error:
        return list(error.complaints)
    return []


def feature_of(complaint: str) -> str:
    """The feature of NOT_BUILT that a complaint names; "" if it names another mistake."""
    path = complaint.split(" = ")[0]
    found = [name for name in NOT_BUILT if path == name or path.startswith(f"{name}.")]
    return found[0] if found and "not supported yet" in complaint else ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_resolves_or_asks_for_a_feature_that_is_not_built(path):
    assert all(map(feature_of, complaints(path)))


def test_how_many_are_refused_for_which_feature():
    first = [feature_of(found[0]) for found in map(complaints, FILES) if found]
    assert {name: first.count(name) for name in NOT_BUILT} == NOT_BUILT
    assert len(FILES) - len(first) == 56


def test_older_trainers_fill_0_warmup_steps():
    zeros = {"scheduler.params.warmup_num_steps": 0}
    for path in FILES:
        assert complaints(path, **zeros) == complaints(path)
