"""Models in tests are built as users build them: what a test gives beside sizes has a row in README.md here.

A setting that tests give and users do not hides faults: without a cache, packed samples seemed kept apart.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
MODEL = (
    r"use_cache|attn_implementation|((lora|attention)_)?dropout|dropout_rate|\w+_dropout_prob|\w+_pdrop|layerdrop"
    r"|(pad|bos|eos)_token_id|tie_word_embeddings"
)
ENGINE = (
    r"unit_min_numel|stage3_param_persistence_threshold|stage3_prefetch_bucket_size|stage3_max_reuse_distance"
    r"|eps|initial_scale_power|native|heartbeat_seconds|steps_per_print|small_numel|zero_allow_untested_optimizer"
)
# a model that a file switches by one of these: its subject is the setting, or transformers demands it
SUBJECTS = {
    "use_cache": {
        "engine/test_data_packing.py",
        "engine/test_sparse_models.py",
        "generation/test_rollouts.py",
        "migration/test_deepspeed_sequences.py",
        "test_real_models.py",
    },
    "attn_implementation": {
        "migration/scripts/long_sequences.py",
        "migration/test_deepspeed_sequences.py",
    },
}


def given(file: Path) -> Iterator[str]:
    """Names of keyword arguments and keys of dicts."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
        elif isinstance(node, ast.Dict):
            keys = (key.value for key in node.keys if isinstance(key, ast.Constant))
            yield from (key for key in keys if isinstance(key, str))


def test_what_tests_give_and_users_do_not_has_a_reason() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for file in {*TESTS.rglob("*.py")} - {Path(__file__)}:
        for name in given(file):
            if re.fullmatch(f"{MODEL}|{ENGINE}", name):
                found[name].add(file.relative_to(TESTS).as_posix())
    page = (TESTS / "README.md").read_text()
    rows = {
        name
        for row in re.findall(r"^\| (.+?) \|", page, re.M)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert found.keys() - rows == set(), "these need a row in tests/README.md"
    for name, files in SUBJECTS.items():
        assert found[name] <= files, f"build the models of these files as users do, without {name}"
