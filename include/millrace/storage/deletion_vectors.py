"""Deletion vectors of Delta tables: sets of row positions that mask rows of a data file (Delta's PROTOCOL.md).

A position is the row's ordinal in its file, from 0, before any filter. A vector file holds any number of vectors: a
version byte, then for each vector its size (4 bytes, big endian), the vector, and a CRC-32 (4 bytes, big endian). A
vector is a magic number and a 64-bit roaring bitmap in the portable form: the number of 32-bit bitmaps, and each with
its key, all little endian. A file of Millrace has fewer than 2**32 rows, so there is one such bitmap, with key 0.

A vector file is complete and durable before a commit names it, and it never changes. A vector that cannot be read is
damage, never an empty vector: readers would see deleted rows.
"""

from __future__ import annotations

import base64
import struct
import uuid
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from millrace.base.errors import InvalidArgument, TableDamaged
from millrace.storage.store import TableStore

Positions = npt.NDArray[np.int64]
"""Row positions of one file, strictly increasing."""

NO_POSITIONS: Final[Positions] = np.zeros(0, dtype=np.int64)

_FILE_VERSION: Final = 1
_MAGIC: Final = 1681511377
_HEADER: Final = struct.Struct("<iqi")
"""Magic number, number of 32-bit bitmaps, key of the only one."""
_FRAME: Final = struct.Struct(">i")
_SUM: Final = struct.Struct(">I")
_ENCODED_ID: Final = 20
"""Characters of an encoded UUID."""
_Z85: Final = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85: Final = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
"""Python's alphabet for the same encoding."""
_TO_Z85: Final = bytes.maketrans(_B85, _Z85)
_FROM_Z85: Final = bytes.maketrans(_Z85, _B85)


@dataclass(frozen=True, slots=True)
class Vector:
    """A deletion vector as a Delta log describes it."""

    storage_type: str
    """``u``: in a file below the table."""
    path_or_inline: str
    """Folder relative to the table, and the encoded UUID of the vector file."""
    offset: int
    size_in_bytes: int
    """Size of the vector, without the size before it and the checksum after it."""
    cardinality: int
    """Number of masked rows."""

    @classmethod
    def from_action(cls, action: Mapping[str, Any] | None) -> Self | None:
        """Return the vector that an action of a log names; None if it names none."""
        if action is None or action.get("pathOrInlineDv") is None:
            return None
        return cls(
            action["storageType"],
            action["pathOrInlineDv"],
            int(action.get("offset") or 0),
            int(action["sizeInBytes"]),
            int(action["cardinality"]),
        )

    def to_action(self) -> dict[str, Any]:
        """Return the vector as an action names it."""
        return {
            "storageType": self.storage_type,
            "pathOrInlineDv": self.path_or_inline,
            "offset": self.offset,
            "sizeInBytes": self.size_in_bytes,
            "cardinality": self.cardinality,
        }

    @property
    def file(self) -> str:
        """The vector's file, relative to the table. Raises TableDamaged for another form than Millrace writes."""
        folder, encoded = self.path_or_inline[:-_ENCODED_ID], self.path_or_inline[-_ENCODED_ID:]
        if self.storage_type != "u" or not folder:
            raise TableDamaged(
                f"a deletion vector has storage type {self.storage_type!r} and path {self.path_or_inline!r}, which "
                "Millrace does not write: publish the collection again"
            )
        return f"{folder}/deletion_vector_{decode_id(encoded)}.bin"


def encode_id(value: uuid.UUID) -> str:
    """Return a UUID in Z85 (20 characters), as a vector's path has it."""
    return base64.b85encode(value.bytes).translate(_TO_Z85).decode("ascii")


def decode_id(text: str) -> uuid.UUID:
    """Return the UUID of its Z85 form. Raises TableDamaged."""
    try:
        return uuid.UUID(bytes=base64.b85decode(text.encode("ascii").translate(_FROM_Z85)))
    except ValueError as error:
        raise TableDamaged(f"{text!r} is not the id of a vector file: publish the collection again") from error


def encode_vector(positions: Positions) -> bytes:
    """Return the bytes of a vector with `positions`, which are strictly increasing and below 2**32."""
    bitmap = BitMap(array("I", positions.astype(np.uint32).tobytes()))
    return _HEADER.pack(_MAGIC, 1, 0) + bitmap.serialize()


def decode_vector(data: bytes) -> Positions:
    """Return the positions of a vector. Raises ValueError."""
    magic, bitmaps, key = _HEADER.unpack_from(data)
    if magic != _MAGIC or bitmaps != 1 or key != 0:
        raise ValueError(f"magic number {magic}, {bitmaps} bitmaps, first key {key}")
    found = BitMap.deserialize(data[_HEADER.size :]).to_array()
    return np.frombuffer(found, dtype=np.uint32).astype(np.int64) if len(found) else NO_POSITIONS


def check_positions(path: str, positions: Positions, rows: int) -> None:
    """Raise InvalidArgument if `positions` are not strictly increasing positions of a file with `rows` rows."""
    if not len(positions):
        return
    if int(positions[0]) < 0 or int(positions[-1]) >= rows or bool(np.any(np.diff(positions) <= 0)):
        raise InvalidArgument(f"masked positions of {path} are not strictly increasing from 0 to {rows - 1}")


def write_vectors(store: TableStore, folder: str, masks: Mapping[str, Positions]) -> tuple[str, dict[str, Vector]]:
    """Write the vectors of several data files into one new file below `folder`. Returns its name, and each vector.

    The file is durable. If the write fails, it is deleted.
    """
    identity = uuid.uuid4()
    name = f"{folder}/deletion_vector_{identity}.bin"
    path = folder + encode_id(identity)
    vectors: dict[str, Vector] = {}
    sink = store.put(name)
    try:
        sink.write(bytes([_FILE_VERSION]))
        offset = 1
        for each, positions in masks.items():
            data = encode_vector(positions)
            sink.write(_FRAME.pack(len(data)) + data + _SUM.pack(zlib.crc32(data)))
            vectors[each] = Vector("u", path, offset, len(data), len(positions))
            offset += _FRAME.size + len(data) + _SUM.size
        sink.sync()
    except BaseException:
        sink.close()
        store.delete([name])
        raise
    sink.close()
    return name, vectors


def read_vector(store: TableStore, vector: Vector) -> Positions:
    """Return the positions of a vector, with size, checksum and cardinality verified. Raises TableDamaged."""
    name = vector.file
    try:
        with store.filesystem.open_input_file(name) as file:
            file.seek(vector.offset)
            framed = file.read(_FRAME.size + vector.size_in_bytes + _SUM.size)
    except FileNotFoundError as error:
        raise TableDamaged(
            f"the deletion vectors {store.uri}/{name} are missing: publish the collection again", missing=True
        ) from error
    try:
        return _unframed(framed, vector)
    except (ValueError, struct.error) as error:
        raise TableDamaged(
            f"a deletion vector in {store.uri}/{name} is damaged ({error}): publish the collection again"
        ) from error


def _unframed(framed: bytes, vector: Vector) -> Positions:
    (size,) = _FRAME.unpack_from(framed)
    data = framed[_FRAME.size : _FRAME.size + vector.size_in_bytes]
    (checksum,) = _SUM.unpack_from(framed, _FRAME.size + vector.size_in_bytes)
    if size != vector.size_in_bytes or zlib.crc32(data) != checksum:
        raise ValueError(f"size {size}, the log says {vector.size_in_bytes}; checksum {checksum:#x}")
    positions = decode_vector(data)
    if len(positions) != vector.cardinality:
        raise ValueError(f"{len(positions)} positions, the log says {vector.cardinality}")
    return positions
