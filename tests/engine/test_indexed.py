"""Indexed files: byte for byte the format of DeepSpeed, both tables of dtypes, damaged files, atomic writes."""

import pickle
import struct

import numpy as np
import pytest
from indexed_files import HEADER, index_of

from xds import UsageError
from xds.engine.config.sections import DataPacking
from xds.engine.data import indexed
from xds.engine.data.indexed import IndexedDataset, IndexedWriter
from xds.engine.data.packing import packed_loader
from xds.utils.errors import DamagedError

ROWS = [[1, 2, 3], [], [4], [65535, 0]]


def put(folder, index, values=b""):
    (folder / "set.idx").write_bytes(index)
    (folder / "set.bin").write_bytes(values)
    return folder / "set"


@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
def test_files_have_the_bytes_of_the_format_and_are_read_back(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(indexed, "_CHUNK_ROWS", chunk)
    with IndexedWriter(tmp_path / "new" / "set", np.uint16) as writer:
        writer.add(ROWS[0])
        writer.add_rows([4], [0, 1])
        writer.end_document()
        writer.add(np.array([ROWS[3]]))
        writer.end_document()
        assert not list(tmp_path.glob("new/set*"))  # nothing appears before the end
    files = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    flat = struct.pack("<6H", 1, 2, 3, 4, 65535, 0)
    assert files == {"set.idx": index_of(6, [3, 0, 1, 2], 2, [0, 3, 4]), "set.bin": flat}
    found = IndexedDataset(str(tmp_path / "new" / "set.idx"))
    for dataset in (found, pickle.loads(pickle.dumps(found))):
        assert [row.tolist() for row in dataset] == ROWS
        assert [row.tolist() for row in dataset[1:3]] == ROWS[1:3]
        assert dataset[np.int64(-1)].tolist() == dataset.flat(3, 4).tolist() == ROWS[3]
        assert dataset.read(0, 1).tolist() == [2, 3] and dataset.read(0, 1, 2).tolist() == [2]
        assert dataset.flat(0, 4).tolist() == [1, 2, 3, 4, 65535, 0]
        assert dataset.lengths.tolist() == [3, 0, 1, 2] and dataset.documents.tolist() == [0, 3, 4]
        assert (dataset.table, dataset.dtype) == ("deepspeed", np.uint16)
    with pytest.raises(IndexError):
        found[4]
    row = IndexedDataset(found.path, copy_as=np.int64)[0]
    row += 1  # a copy
    assert row.dtype == np.int64 and found[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("code", "itemsize", "table", "dtype"),
    [
        *((6, 2, "deepspeed", "u2"), (6, 8, "megatron", "f8"), (7, 4, "deepspeed", "u4")),
        *((8, 8, "deepspeed", "u8"), (8, 2, "megatron", "u2"), (4, 4, "both", "i4")),
    ],
)
def test_the_table_of_dtypes_is_found_from_the_lengths(tmp_path, code, itemsize, table, dtype):
    index = index_of(code, [2, 1], itemsize, [0, 2])
    dataset = IndexedDataset(put(tmp_path, index, bytes(3 * itemsize)))
    assert (dataset.table, dataset.dtype) == (table, np.dtype(dtype))
    if code == 7:
        assert IndexedDataset(dataset.path, table="megatron").dtype == np.float32
    modes = IndexedDataset(put(tmp_path, index + b"\0\0", bytes(3 * itemsize)))
    assert len(modes) == 2


GOOD = index_of(4, [2, 1], 4, [0, 2])
DAMAGES = {
    "empty": (b"", "not an index"),
    "magic": (b"TNTIDX\0\0\0" + GOOD[9:], "not an index"),
    "version": (GOOD[:9] + b"\2" + GOOD[10:], "version is 2"),
    "dtype": (index_of(9, [2, 1], 4, [0, 2]), "dtype code 9"),
    "cut": (GOOD[:-1], "need 74"),
    "rows": (HEADER.pack(b"MMIDIDX\0\0", 1, 4, 2**63, 2**64 - 1) + GOOD[34:], "rows and"),
    "longer row": (index_of(4, [2, 2], 4, [0, 2]), "row 1 has 2 values of 4 bytes at byte 8"),
    "negative size": (index_of(4, [2, -1], 4, [0, 2]), "row 1 has -1"),
    "negative position": (index_of(4, [2, 1], 4, [0, 2], [-4, 8]), "row 0 has 2 values"),
    "far position": (index_of(4, [2, 1], 4, [0, 2], [0, 2**63 - 1]), "row 1"),
    "document": (index_of(4, [2, 1], 4, [0, 3]), "document"),
    "negative document": (index_of(4, [2, 1], 4, [-1, 2]), "document"),
}


@pytest.mark.parametrize("index, said", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_index_is_one_sentence(tmp_path, index, said):
    with pytest.raises(DamagedError) as error:
        IndexedDataset(put(tmp_path, index, bytes(12)))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_every_cut_and_every_changed_byte_is_read_or_refused(tmp_path):
    """No byte of an index leads to another exception, or to values outside of the file."""
    for at in range(len(GOOD)):
        for index in (GOOD[:at], GOOD[:at] + bytes([GOOD[at] ^ 0x81]) + GOOD[at + 1 :]):
            try:
                dataset = IndexedDataset(put(tmp_path, index, bytes(12)))
            except DamagedError:
                continue
            assert all(row.nbytes == size * dataset.dtype.itemsize for row, size in
                       zip(dataset, dataset.lengths, strict=True))  # fmt: skip


def test_wrong_calls_are_refused_and_leave_the_old_files(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        IndexedDataset(tmp_path / "none")
    with IndexedWriter(tmp_path / "set", np.uint8) as writer:
        writer.add([255])
    before = (tmp_path / "set.idx").read_bytes()
    for rows, said in (([256], "do not fit uint8"), ([-1], "from -1"), ([0.5], "float64")):
        with pytest.raises(UsageError, match=said), IndexedWriter(tmp_path / "set", "u1") as writer:
            writer.add(rows)
    with pytest.raises(UsageError, match="integer"):
        IndexedWriter(tmp_path / "set", np.float32)
    assert {path.name for path in tmp_path.iterdir()} == {"set.idx", "set.bin"}
    assert (tmp_path / "set.idx").read_bytes() == before
    with IndexedWriter(tmp_path / "set", "i8"):
        pass
    assert len(IndexedDataset(tmp_path / "set")) == 0


def test_the_loader_packs_rows_of_the_file(tmp_path):
    with IndexedWriter(tmp_path / "set", np.uint16) as writer:
        writer.add_rows(np.arange(90), [3, 0, 5, 4, 8, 40, 7, 9, 2, 12])
    dataset = IndexedDataset(tmp_path / "set", copy_as=np.int64)
    seen = []
    for rank in range(2):
        packing = DataPacking(tokens=16, drop_longer=True)
        shape = {"micro_batch_size": 1, "step_rows": 2}
        for batch in packed_loader(dataset, packing, rank=rank, world_size=2, **shape):
            is_token = batch["input_ids"][0] != 0
            seen += batch["input_ids"][0][is_token].tolist()
    whole = [one for row in dataset if len(row) <= 16 for one in row.tolist() if one]
    assert set(seen) == set(whole)
