"""The analyzer's files are those of DeepSpeed, byte for byte; runs, processes and the usual metrics."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from indexed_files import CODES, index_of

from xds import UsageError
from xds.engine.data import analyzer
from xds.engine.data.analyzer import (
    Metric,
    SequenceLength,
    VocabularyRarity,
    analyze,
    token_counts,
)
from xds.engine.data.indexed import IndexedDataset, IndexedWriter
from xds.launcher import cli


class Numbers:
    """A dataset of numbers, which each are read once."""

    def __init__(self, values):
        self.values, self.read = values, []

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        self.read.append(index)
        return self.values[index]


def same(batch):
    return np.array(batch)


def histogram(batch):
    return np.bincount(np.array(batch) % 7, minlength=7)


def both(name, rows, code, documents):
    """The two files of rows, by their names."""
    kind = code[0] + str(8 * int(code[1]))
    index = index_of(CODES[code], list(map(len, rows)), int(code[1]), documents)
    values = np.array([one for row in rows for one in row], {"u": "u", "i": "i"}[kind[0]] + code[1])
    return {f"{name}.idx": index, f"{name}.bin": values.tobytes()}


def expected(name, values, numbers, value_code, number_code):
    """What DeepSpeed's DataAnalyzer writes, with one process that merges."""
    found = {}
    for value, number in zip(values, numbers, strict=True):
        found.setdefault(value, []).append(number)
    keys = sorted(found)
    rows = [found[key] for key in keys]
    step = max(1, len(keys) // 100)
    merged = [sum(rows[at : at + step], []) for at in range(0, len(rows), step)]
    n, k, p = len(values), len(keys), len(merged)
    return {
        **both(f"{name}_sample_to_metric", [[one] for one in values], value_code, [0, n, n]),
        **both(f"{name}_index_to_metric", [[key] for key in keys], value_code, [0, k, k]),
        **both(f"{name}_index_to_sample", rows, number_code, [0, k, k]),
        **both(f"{name}_index_to_sample_percentile_merged", merged, number_code, [0, p]),
    }


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("run", "merge"), [(1 << 20, 1 << 22), (64, 40), (7, 1), (100, 1 << 22)])
@pytest.mark.parametrize("kind", ["few", "many", "negative", "equal"])
def test_the_files_are_those_of_deepspeed_whatever_the_runs(
    tmp_path, monkeypatch, run, merge, kind
):
    monkeypatch.setattr(analyzer, "RUN_NUMEL", run)
    monkeypatch.setattr(analyzer, "MERGE_NUMEL", merge)
    draw = np.random.default_rng(len(kind))
    values, code = {
        "few": (draw.integers(0, 9, 611), "u1"),
        "many": (draw.integers(0, 90_000, 611), "u4"),
        "negative": (draw.integers(-200, 200, 611), "i2"),
        "equal": (np.full(611, 300), "u2"),
    }[kind]
    dataset = Numbers(values.tolist())
    metrics = [Metric("plain", same), Metric("sums", histogram, is_sum=True)]
    found = analyze(dataset, metrics, tmp_path, batch_size=32)
    assert dataset.read == list(range(611))
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "sums"}
    want = expected("plain", values.tolist(), range(611), code, "u2")
    assert files_of(tmp_path / "plain") == want
    sums = np.bincount(values % 7, minlength=7).tolist()
    code = "u1" if max(sums) < 256 else "u2"
    assert files_of(tmp_path / "sums") == both("sums_metric_value", [sums], code, [0, 1])
    one = found["plain"]
    assert (one.least, one.most, one.num_values) == (
        *(values.min(), values.max()), len(set(values.tolist())),
    )  # fmt: skip
    assert len(IndexedDataset(one.file("sample_to_metric"))) == 611


def test_processes_give_the_same_files_and_samples_may_have_other_numbers(tmp_path):
    values = np.random.default_rng(0).integers(0, 50, 90).tolist()
    numbers = list(range(89, -1, -1))
    metrics = [Metric("plain", same), Metric("sums", histogram, is_sum=True)]
    for workers in (1, 2):
        out = tmp_path / str(workers)
        more = {"num_workers": workers, "sample_indices": numbers}
        analyze(Numbers(values), metrics, out, batch_size=8, **more)
        assert files_of(out / "plain") == expected("plain", values, numbers, "u1", "u1")
    assert files_of(tmp_path / "1" / "sums") == files_of(tmp_path / "2" / "sums")


def test_wrong_metrics_are_one_sentence_and_leave_nothing(tmp_path):
    data = Numbers([1, 2, 3])
    for metrics, more, said in (
        ([Metric("m", lambda batch: np.ones(2))], {}, "float64"),
        ([Metric("m", lambda batch: np.ones(2, int))], {}, "2 values for a batch of 3"),
        (
            [Metric("m", lambda batch: np.ones(len(batch), int), True)],
            {"batch_size": 2},
            "one length",
        ),
        ([Metric("m", lambda batch: batch)], {"num_workers": 2}, "in a module"),
        ([Metric("m", same), Metric("m", same)], {}, "each name once"),
        ([Metric("m", same)], {"sample_indices": [1]}, "1 sample_indices for 3 samples"),
    ):
        with pytest.raises(UsageError, match=said):
            analyze(data, metrics, tmp_path, **more)
        assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="no samples"):
        analyze(Numbers([]), [Metric("m", same)], tmp_path)
    with pytest.raises(UsageError, match="name"):
        Metric("../m", same)


ROWS = [[5, 1, 1, 0, 0], [], [1, 1], [5, 7, 7, 7, 0], [0]]


def test_the_usual_metrics_of_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(analyzer, "MERGE_NUMEL", 4)
    with IndexedWriter(tmp_path / "tokens", np.uint16) as writer:
        for row in ROWS:
            writer.add(np.array(row, int))
    dataset = IndexedDataset(tmp_path / "tokens")
    assert SequenceLength()(ROWS).tolist() == [5, 0, 2, 5, 1]
    assert SequenceLength(0)([np.array(row, int) for row in ROWS]).tolist() == [3, 0, 2, 4, 0]
    counts = token_counts(dataset, 0)
    assert counts.tolist() == [0, 4, 0, 0, 0, 2, 0, 3]
    share = {1: 4 / 9, 5: 2 / 9, 7: 3 / 9}
    rarity = [round(sum(-np.log(share[one]) for one in row if one)) for row in ROWS]
    found = VocabularyRarity(counts)([np.array(row, int) for row in ROWS])
    assert found.tolist() == rarity == [3, 0, 2, 5, 0]


def test_the_commands_analyze_and_describe_indexed_files(tmp_path, capsys):
    with IndexedWriter(tmp_path / "tokens", np.uint16) as writer:
        for row in ROWS:
            writer.add(np.array(row, int))
    out = tmp_path / "metrics"
    words = [str(tmp_path / "tokens"), "--out", str(out), "--pad-id", "0"]
    assert cli.main(["data", "analyze", *words, "--metrics", "seqlen", "vocab_rarity"]) == 0
    assert "seqlen" in capsys.readouterr().out
    lengths = IndexedDataset(out / "seqlen" / "seqlen_sample_to_metric")
    assert [int(row[0]) for row in lengths] == [3, 0, 2, 4, 0]
    rarity = IndexedDataset(out / "vocab_rarity" / "vocab_rarity_index_to_metric")
    assert [int(row[0]) for row in rarity] == [0, 2, 3, 5]
    assert cli.main(["data", "info", str(tmp_path / "tokens.bin"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_rows"], facts["numel"], facts["dtype"]) == (5, 13, "uint16")
    assert (facts["shortest_numel"], facts["longest_numel"]) == (0, 5)
    assert cli.main(["data", "info", str(tmp_path / "tokens")]) == 0
    assert "uint16" in capsys.readouterr().out
    Path(tmp_path / "tokens.idx").write_bytes(struct.pack("<9s", b"TNTIDX"))
    assert cli.main(["data", "info", str(tmp_path / "tokens")]) == 1
    assert "damaged" in capsys.readouterr().err
    assert cli.main(["data", "info", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    "rows, dtype, said",
    [
        ([[1 << 62], [1]], np.int64, "4611686018427387904 is no token"),
        ([[2**64 - 1]], np.uint64, "is no token"),
        ([[2**32 - 1], [0]], np.uint32, "name the table of its dtype codes"),
        ([[-5, 3]], np.int32, "from 0 on"),
        ([[], []], np.int32, ""),
    ],
)
def test_values_that_are_no_tokens_are_one_sentence(tmp_path, capsys, recwarn, rows, dtype, said):
    """Counts of them would fill the memory. Rows without a token have no rarity, and no warning."""
    with IndexedWriter(tmp_path / "tokens", dtype) as writer:
        for row in rows:
            writer.add(np.array(row, dtype))
    words = ["data", "analyze", str(tmp_path / "tokens"), "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--metrics", "vocab_rarity"]) == (2 if said else 0)
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == bool(said) and not recwarn.list


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, capsys):
    with IndexedWriter(tmp_path / "tokens", np.uint16) as writer:
        writer.add(np.array(ROWS[0], int))
    (tmp_path / "file").write_text("")
    for path in ("file", "file/below"):
        words = [str(tmp_path / "tokens"), "--out", str(tmp_path / path)]
        assert cli.main(["data", "analyze", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("path", ["", ".", "/", "no\x1b[2Jne"])
def test_a_path_that_names_no_files_is_one_sentence(path, tmp_path, capsys):
    assert cli.main(["data", "info", path]) == 2
    assert cli.main(["data", "analyze", path, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 2 and said.count("give the path") == 2 and "\x1b" not in said
