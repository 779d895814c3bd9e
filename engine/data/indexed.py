"""Rows of numbers in two files: the values in PATH.bin, and where each row begins in PATH.idx.

The format is Megatron's MMapIndexedDataset, which DeepSpeed uses too. All numbers are little-endian.

    .idx   "MMIDIDX\\0\\0"   version 1, u64   dtype code, u8   rows, u64   documents, u64
           sizes of the rows, i32   their positions in .bin in bytes, i64   first row of each document, i64
    .bin   the values

Megatron and DeepSpeed disagree on the dtypes 6 to 8:

    code         1    2    3    4    5    6    7    8
    DeepSpeed    u8   i8   i16  i32  i64  u16  u32  u64
    Megatron     u8   i8   i16  i32  i64  f64  f32  u16

The reader compares the lengths of the files to find out which table was meant. The writer uses DeepSpeed's.
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ...utils.errors import DamagedError, UsageError
from ...utils.quoting import printable, quoted

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_COMMON = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8"}
DTYPES = {
    "deepspeed": {**_COMMON, 6: "<u2", 7: "<u4", 8: "<u8"},
    "megatron": {**_COMMON, 6: "<f8", 7: "<f4", 8: "<u2"},
}
_CHUNK_ROWS = 1 << 20  # rows that are checked or written at a time: bounds the memory
_MOST_ROW_NUMEL = 2**31 - 1  # sizes are int32

Values = NDArray[Any]


class IndexedDataset(Sequence[Values]):
    """The rows of PATH.bin and PATH.idx, memory-mapped: opening reads the index, a row reads itself.

    `dataset[3]` is a row, `dataset[3:5]` a list of rows, `dataset.lengths` the number of values of each row.
    As `training_data` of the engine it is packed without reading the rows of other ranks.

    Attributes:
        dtype: of the values in the file.
        table: whose dtype codes were used: "deepspeed", "megatron", or "both" where they agree.
        lengths: int32 [rows].
        documents: int64, the first row of each document, and usually the number of rows.
    """

    def __init__(
        self, path: str | Path, *, table: str | None = None, copy_as: DTypeLike | None = None
    ) -> None:
        """
        Args:
            path: without .bin and .idx.
            table: "deepspeed" or "megatron", for the dtype codes 6 to 8. None: found from the lengths of the
                files. Code 7 has 4 bytes in both; it is DeepSpeed's u32 then.
            copy_as: rows are copies in this dtype, which may be changed. None: they are views of the file,
                which are read-only.

        Raises:
            UsageError: there are no such files, or an argument is wrong.
            DamagedError: the files are not of this format, or do not fit together.
        """
        self.path = _prefix(path)
        if table not in (None, *DTYPES):
            raise UsageError(f"table = {quoted(table)}: must be deepspeed or megatron")
        self._given = table, copy_as
        self._copy_as = None if copy_as is None else np.dtype(copy_as)
        index, self._bin = _mapped(self.path, ".idx"), _mapped(self.path, ".bin")
        code, rows, documents = self._header(index)
        ends = np.cumsum([_HEADER.size, 4 * rows, 8 * rows, 8 * documents]).tolist()
        self.lengths: NDArray[np.int32] = index[ends[0] : ends[1]].view("<i4")
        self._positions: NDArray[np.int64] = index[ends[1] : ends[2]].view("<i8")
        self.documents: NDArray[np.int64] = index[ends[2] : ends[3]].view("<i8")
        self.table, self.dtype = self._dtype_of(code)
        self._check_rows()

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Values: ...

    @overload
    def __getitem__(self, index: slice) -> list[Values]: ...

    def __getitem__(self, index: int | slice) -> Values | list[Values]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return self.read(index)

    def __iter__(self) -> Iterator[Values]:
        return map(self.read, range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.path, *self._given)

    def read(self, row: int, start: int = 0, stop: int | None = None) -> Values:
        """The values of a row from `start` up to `stop` (None: its end)."""
        length = self.lengths[row]  # raises IndexError
        start, stop, _ = slice(start, stop).indices(int(length))
        at, itemsize = int(self._positions[row]), self.dtype.itemsize
        found = self._bin[at + start * itemsize : at + max(start, stop) * itemsize].view(self.dtype)
        return found if self._copy_as is None else found.astype(self._copy_as)

    def flat(self, start: int, stop: int) -> Values:
        """The values of the rows from `start` up to `stop`, one after another [sum of their lengths]."""
        lengths, positions = self.lengths[start:stop], self._positions[start:stop]
        if not len(lengths):
            return np.empty(0, self.dtype)
        sizes_bytes = lengths.astype(np.int64) * self.dtype.itemsize
        if (positions[1:] == positions[:-1] + sizes_bytes[:-1]).all():
            end = int(positions[-1] + sizes_bytes[-1])
            return self._bin[int(positions[0]) : end].view(self.dtype)
        rows = range(*slice(start, stop).indices(len(self)))
        return np.concatenate([self.read(row) for row in rows])

    def _header(self, index: NDArray[np.uint8]) -> tuple[int, int, int]:
        """The dtype code and the numbers of rows and documents, which fit the length of the file."""
        if len(index) < _HEADER.size or bytes(index[: len(MAGIC)]) != MAGIC:
            raise self._damage(
                ".idx", "it is not an index of this format, which begins with MMIDIDX"
            )
        _, version, code, rows, documents = _HEADER.unpack(bytes(index[: _HEADER.size]))
        if version != 1:
            raise self._damage(".idx", f"its version is {version}; only version 1 can be read")
        need = _HEADER.size + 12 * rows + 8 * documents
        if len(index) not in (need, need + rows):  # Megatron may add a mode of one byte a row
            raise self._damage(
                ".idx",
                f"it has {len(index)} bytes, but {rows} rows and {documents} documents need {need}",
            )
        return code, rows, documents

    def _dtype_of(self, code: int) -> tuple[str, np.dtype[Any]]:
        """The table that fits the length of the .bin file, and the dtype."""
        found = {name: np.dtype(dtypes[code]) for name, dtypes in DTYPES.items() if code in dtypes}
        if not found:
            raise self._damage(".idx", f"it has the dtype code {code}; only 1 to 8 are known")
        if len(set(found.values())) == 1:
            return "both", found["deepspeed"]
        given, _ = self._given
        if given is not None:
            return given, found[given]
        numel = int(self.lengths.sum(dtype=np.int64))
        for name, dtype in found.items():
            if numel * dtype.itemsize == len(self._bin):
                return name, dtype
        return "deepspeed", found["deepspeed"]

    def _check_rows(self) -> None:
        """So that no row reaches out of the .bin file."""
        itemsize, size_bytes = self.dtype.itemsize, len(self._bin)
        for first in range(0, len(self), _CHUNK_ROWS):
            lengths = self.lengths[first : first + _CHUNK_ROWS].astype(np.int64)
            positions = self._positions[first : first + _CHUNK_ROWS]
            # no sum overflows: a position beyond the file is found first
            wrong = (lengths < 0) | (positions < 0) | (positions > size_bytes)
            wrong |= lengths * itemsize > size_bytes - np.where(wrong, 0, positions)
            if wrong.any():
                row = first + int(wrong.argmax())
                raise self._damage(
                    ".idx",
                    f"row {row} has {self.lengths[row]} values of {itemsize} bytes at byte "
                    f"{self._positions[row]}, but the .bin file has {size_bytes} bytes",
                )
        documents = self.documents
        if len(documents) and not 0 <= documents.min() <= documents.max() <= len(self):
            raise self._damage(".idx", f"a document begins outside of the {len(self)} rows")

    def _damage(self, suffix: str, why: str) -> DamagedError:
        return DamagedError(f"{printable(self.path)}{suffix} is damaged: {why}")


def _opened(path: Path, table: str | None, copy_as: DTypeLike | None) -> IndexedDataset:
    """When it is unpickled, in another process: the files are opened again."""
    return IndexedDataset(path, table=table, copy_as=copy_as)


class IndexedWriter:
    """Writes PATH.bin and PATH.idx with bounded memory.

    A context manager: the files appear, complete, at the end of the block, and not at all after an error. They
    replace earlier ones.
    """

    def __init__(self, path: str | Path, dtype: DTypeLike) -> None:
        """
        Args:
            path: without .bin and .idx. Its folder is made.
            dtype: of the values: a signed or unsigned integer of 1, 2, 4 or 8 bytes.

        Raises:
            UsageError: the format has no such dtype.
        """
        self._path = _prefix(path)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = {np.dtype(one): code for code, one in DTYPES["deepspeed"].items()}
        if self.dtype not in codes:
            raise UsageError(f"dtype = {self.dtype}: must be an integer of 8 to 64 bits")
        self._code = codes[self.dtype]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        mark = f"part-{secrets.token_hex(4)}"
        self._parts = [
            self._path.with_name(f".{self._path.name}{suffix}.{mark}")
            for suffix in (".bin", ".idx")
        ]
        self._bin = open(self._parts[0], "xb", buffering=1 << 20)  # noqa: SIM115 (closed in __exit__)
        # the sizes stand before their sums in the index, so they wait in a file
        self._sizes = tempfile.TemporaryFile(dir=self._path.parent)  # noqa: SIM115
        self._pending = array("i")
        self._documents = array("q", [0])
        self._num_open = 0  # values after the last closed row
        self.num_rows = 0

    def add(self, row: ArrayLike) -> None:
        """Append a row; an array of more dimensions is flattened.

        Raises:
            UsageError: a value does not fit the dtype, or the row is too long.
        """
        values = np.asarray(row)
        self.add_rows(values.reshape(-1), [values.size])

    def add_rows(self, values: ArrayLike, lengths: ArrayLike) -> None:
        """Append rows of `lengths` [rows], whose values stand one after another in `values`.

        Raises:
            UsageError: as `add`, or the lengths do not add up.
        """
        sizes = np.asarray(lengths, np.int64).reshape(-1)
        flat = np.asarray(values).reshape(-1)
        if sizes.sum() != flat.size:
            raise UsageError(f"rows of {sizes.sum()} values in all: there are {flat.size} values")
        self.append(flat)
        self.close_rows(sizes)

    def append(self, values: Values) -> None:
        """Append values [numel] of a row that `close_rows` closes later."""
        self._bin.write(_cast(values, self.dtype).data)
        self._num_open += values.size

    def close_rows(self, lengths: NDArray[np.int64]) -> None:
        """Cut the values since the last closed row into rows of `lengths` [rows]."""
        if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= _MOST_ROW_NUMEL:
            raise UsageError(
                f"a row of {lengths.max()} values: at most {_MOST_ROW_NUMEL} fit the index of this format"
            )
        self._num_open -= int(lengths.sum())
        self._pending.frombytes(lengths.astype(np.intc).tobytes())
        self.num_rows += len(lengths)
        if len(self._pending) > _CHUNK_ROWS:
            self._flush()

    def end_document(self) -> None:
        """The next row begins a new document. DeepSpeed's files have this at the end too."""
        self._documents.append(self.num_rows)

    def _flush(self) -> None:
        self._sizes.write(np.frombuffer(self._pending, np.intc).astype("<i4").data)
        self._pending = array("i")

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._write_index()
                self._publish()
        finally:
            self._bin.close()
            self._sizes.close()
            for part in self._parts:
                with suppress(FileNotFoundError):
                    part.unlink()

    def _write_index(self) -> None:
        assert self._num_open == 0, "values without a row"
        self._flush()
        with open(self._parts[1], "xb") as index:
            documents = np.frombuffer(self._documents, np.int64).astype("<i8")
            index.write(_HEADER.pack(MAGIC, 1, self._code, self.num_rows, len(documents)))
            for sizes in self._size_chunks():
                index.write(sizes.data)
            at = 0
            for sizes in self._size_chunks():
                ends = np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize + at
                index.write(
                    (ends - sizes.astype(np.int64) * self.dtype.itemsize).astype("<i8").data
                )
                at = int(ends[-1])
            index.write(documents.data)
            index.flush()
            os.fsync(index.fileno())

    def _size_chunks(self) -> Iterator[NDArray[np.int32]]:
        self._sizes.seek(0)
        while data := self._sizes.read(4 * _CHUNK_ROWS):
            yield np.frombuffer(data, "<i4")

    def _publish(self) -> None:
        """The index last: without it readers find no dataset, so they never see two halves."""
        self._bin.flush()
        os.fsync(self._bin.fileno())
        index = self._path.with_name(f"{self._path.name}.idx")
        index.unlink(missing_ok=True)
        os.replace(self._parts[0], self._path.with_name(f"{self._path.name}.bin"))
        os.replace(self._parts[1], index)


def smallest_dtype(least: int, most: int) -> np.dtype[Any]:
    """The narrowest integer dtype for values from `least` to `most`; unsigned without negative ones."""
    names = ("i1", "i2", "i4", "i8") if least < 0 else ("u1", "u2", "u4", "u8")
    for name in names:
        dtype = np.dtype(f"<{name}")
        if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
            return dtype
    raise UsageError(f"values from {least} to {most} do not fit 64 bits")


def _cast(values: Values, dtype: np.dtype[Any]) -> Values:
    """The values in another dtype, none of them changed; contiguous."""
    if values.size and not np.can_cast(values.dtype, dtype, "safe"):
        least, most, limits = values.min(), values.max(), np.iinfo(dtype)
        if values.dtype.kind not in "iub" or least < limits.min or most > limits.max:
            raise UsageError(
                f"values of {values.dtype} from {least} to {most}: they do not fit {dtype}, the dtype of the "
                "file; write it with a wider one, and whole numbers only"
            )
    return np.ascontiguousarray(values, dtype)


def _prefix(path: str | Path) -> Path:
    """The path without .bin and .idx."""
    found = Path(path)
    if not found.name:
        raise UsageError(
            f"{quoted(path)} is no name of files; give the path of a .bin and an .idx file, without the ending"
        )
    return found.with_suffix("") if found.suffix in (".bin", ".idx") else found


def _mapped(path: Path, suffix: str) -> NDArray[np.uint8]:
    """The bytes of a file, memory-mapped."""
    file = path.with_name(path.name + suffix)
    try:
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{printable(file)}: not a file")
        if not found.st_size:  # cannot be mapped
            return np.empty(0, np.uint8)
        return np.memmap(file, np.uint8, "r").view(np.ndarray)  # slices of a memmap are slow
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(
            f"{printable(file)}: {why}; give the path of a .bin and an .idx file, without the ending"
        ) from None


__all__ = ["DTYPES", "IndexedDataset", "IndexedWriter", "smallest_dtype"]
