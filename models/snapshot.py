"""One file for a set of arrays and a JSON header: no pickle, a checksum over all of it, replaced atomically."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from forewarn.collectors.errors import StorageError

MAGIC = b"forewarn-state-1\n"
DIGEST_BYTES = 32
PART_BYTES = 64 * 1024 * 1024


class _Hashing:
    """A stream that is hashed as it passes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def write(self, data: bytes | memoryview) -> int:
        self.digest.update(data)
        return self._stream.write(data)

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.digest.update(data)
        return data

    def fill(self, array: NDArray[Any]) -> None:
        """Read an array's bytes into it, part by part: states are too large to hold twice."""
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), PART_BYTES):
            part = flat[start : start + PART_BYTES].data
            if self._stream.readinto(part) != len(part):  # type: ignore[attr-defined]  # BinaryIO does not declare it
                raise ValueError("cut short")
            self.digest.update(part)


def other_version(path: Path, what: str) -> StorageError:
    """The error for a state that another version of Forewarn wrote."""
    return StorageError(
        f"{path}: written by another version of Forewarn ({what} differs): remove it, and the state is built anew"
    )


def write(path: Path, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write header and arrays. Raises StorageError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    head = json.dumps({"header": dict(header), "arrays": described}, allow_nan=False).encode()
    try:
        with temporary.open("wb") as file:
            stream = _Hashing(file)
            stream.write(MAGIC)
            stream.write(len(head).to_bytes(8, "little"))
            stream.write(head)
            for array in arrays.values():
                stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.write(stream.digest.digest())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StorageError(f"{path}: the state could not be written: {error}") from error


def read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read what `write` wrote. Raises StorageError when it is missing, damaged or cut short."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            stream = _Hashing(file)
            if stream.read(len(MAGIC)) != MAGIC:
                raise ValueError("not a state file of this version")
            length = int.from_bytes(stream.read(8), "little")
            if length > size:
                raise ValueError("cut short")
            head = json.loads(stream.read(length))
            arrays: dict[str, NDArray[Any]] = {}
            for name, dtype, shape in head["arrays"]:
                kind = np.dtype(dtype)
                if kind.hasobject:
                    raise ValueError("holds objects")
                if int(np.prod(shape)) * kind.itemsize > size:
                    raise ValueError("cut short")
                arrays[name] = np.empty(shape, kind)
                stream.fill(arrays[name])
            if file.read() != stream.digest.digest():
                raise ValueError("the checksum differs")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path}: the state cannot be read ({error}): remove it, and the state is built anew"
        ) from error
    return head["header"], arrays
