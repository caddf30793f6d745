"""Objects of a store as files for pyarrow: a range of bytes is one request, and no thread waits for another's.

delta-rs has such a file system too, but it holds the interpreter's lock while a request is under way.
"""

from __future__ import annotations

import io
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import obstore
import pyarrow as pa
import pyarrow.fs as fs
from obstore.exceptions import BaseError, GenericError, NotSupportedError, PermissionDeniedError, UnauthenticatedError

from millrace.base.errors import InvalidSettings
from millrace.storage.store import StoreUnreachable

TORN_TRIES: Final = 5
"""Number of requests for an answer whose body ends early. obstore repeats requests, but not for their bodies."""
_TORN: Final = "response body"
_ANSWER: Final = re.compile(r"<(?:Code|Message)>([^<]*)<")
_CREDENTIALS: Final = "check the credentials and their rights"
_SETTINGS: Final = (
    (re.compile(r"status code: 40[13]\b"), _CREDENTIALS),
    (
        re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist"),
        "create the bucket, or correct the address of the tables",
    ),
    (re.compile("incorrectly configured region|AuthorizationHeaderMalformed"), "set AWS_REGION to the bucket's region"),
    (re.compile("ExpiredToken|InvalidToken"), _CREDENTIALS),
    (re.compile("HTTP error: builder error"), "an address without TLS (http://) needs AWS_ALLOW_HTTP=true"),
)
"""Signs of errors that only the operator can fix, and what to do."""
_TORN_PAUSE: Final = 0.5
_TORN_SECONDS: Final = 30.0
_MACHINE_ROLE: Final = "//169.254.169.254/"
TAIL_BYTES: Final = 64 << 10
"""Bytes of an object in its first request: a Parquet file's footer, or the whole of a small one."""


_T = TypeVar("_T")


def file_system(uri: str, objects: Any) -> fs.FileSystem:
    """Return the objects below `uri` as a file system, to be read alone."""
    return fs.PyFileSystem(_Objects(uri, objects))


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Raise a store's error as StoreUnreachable, or as InvalidSettings if only the operator can fix it."""
    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise InvalidSettings(f"the store refuses {what}: {_words(error)}: {_CREDENTIALS}") from None
    except (BaseError, FileNotFoundError) as error:
        # A listing, and a bucket that is not there, have no errors of their own.
        cause = next((cause for sign, cause in _SETTINGS if sign.search(str(error))), "")
        if cause:
            raise InvalidSettings(f"the store refuses {what}: {_words(error)}: {cause}") from None
        if isinstance(error, FileNotFoundError):
            raise
        raise StoreUnreachable(f"{what}: {_words(error)}") from None


def read_whole(what: str, call: Callable[[], _T]) -> _T:
    """Return what `call` reads; repeat it if the answer ends early, which obstore does not. Raises as os_errors."""
    begun = time.monotonic()
    for left in reversed(range(TORN_TRIES)):
        try:
            with os_errors(what):
                return call()
        except OSError as error:
            if _TORN not in str(error) or not left or time.monotonic() - begun > _TORN_SECONDS:
                raise
            time.sleep(random.uniform(0, _TORN_PAUSE))
    raise AssertionError("the last try returns or raises")


def _words(error: Exception) -> str:
    """Return an error's message on one line, without the sources that obstore appends to it."""
    text, _, answer = str(error).partition("Debug source")[0].partition("<?xml")
    text += ": ".join(_ANSWER.findall(answer))  # of the XML of S3
    words = " ".join(text.split())[:500]
    if _MACHINE_ROLE in words:
        words += "; the environment has no credentials, so this machine's role was asked for them"
    return words


class _Objects(fs.FileSystemHandler):  # type: ignore[misc] # pyarrow has no types
    """The interface that pyarrow asks for."""

    def __init__(self, uri: str, objects: Any) -> None:
        self._uri, self._objects = uri, objects

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Objects) and other._uri == self._uri

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._uri)

    def get_type_name(self) -> str:
        return "object-store"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._info(path) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        base = selector.base_dir.rstrip("/")
        if selector.recursive:
            return read_whole(self._uri, lambda: self._below(base))
        listed = read_whole(self._uri, lambda: obstore.list_with_delimiter(self._objects, prefix=base or None))
        folders = [fs.FileInfo(each.rstrip("/"), fs.FileType.Directory) for each in listed["common_prefixes"]]
        return [*folders, *(_described(each) for each in listed["objects"])]

    def _below(self, base: str) -> list[fs.FileInfo]:
        parts = obstore.list(self._objects, prefix=base or None)
        return [_described(each) for part in parts for each in part]

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(_ObjectFile(self._objects, path), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)

    def create_dir(self, path: str, recursive: bool) -> None:
        raise self._only_read()

    def delete_dir(self, path: str) -> None:
        raise self._only_read()

    def delete_dir_contents(self, path: str, missing_dir_ok: bool) -> None:
        raise self._only_read()

    def delete_root_dir_contents(self) -> None:
        raise self._only_read()

    def delete_file(self, path: str) -> None:
        raise self._only_read()

    def move(self, src: str, dest: str) -> None:
        raise self._only_read()

    def copy_file(self, src: str, dest: str) -> None:
        raise self._only_read()

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        raise self._only_read()

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        raise self._only_read()

    def _only_read(self) -> OSError:
        return io.UnsupportedOperation(f"{self._uri} is only read this way: files are written by its store")

    def _info(self, path: str) -> fs.FileInfo:
        try:
            with os_errors(path):
                return _described(obstore.head(self._objects, path))
        except FileNotFoundError:
            return fs.FileInfo(path, fs.FileType.NotFound)


def _described(found: Any) -> fs.FileInfo:
    modified: datetime = found["last_modified"]
    return fs.FileInfo(found["path"], fs.FileType.File, size=found["size"], mtime=modified.astimezone(UTC))


class _ObjectFile(io.RawIOBase):
    """An object at random access. Its end comes with the first request."""

    def __init__(self, objects: Any, path: str) -> None:
        super().__init__()
        self._objects, self._path = objects, path
        self._place = 0
        self._size, self._tail = read_whole(path, self._end)

    def _end(self) -> tuple[int, bytes]:
        try:
            found = obstore.get(self._objects, self._path, options={"range": {"suffix": TAIL_BYTES}})
            return int(found.meta["size"]), bytes(found.bytes())
        except (GenericError, NotSupportedError) as error:  # an empty object; Azure
            if _TORN in str(error):
                raise
            return int(obstore.head(self._objects, self._path)["size"]), b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def size(self) -> int:
        """Bytes of the object."""
        return int(self._size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, start + offset)
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        wanted = self._size - self._place if size is None or size < 0 else size
        start, end = self._place, min(self._place + wanted, self._size)
        if start >= end:
            return b""
        self._place = end
        held = self._size - len(self._tail)
        if start >= held:
            return self._tail[start - held : end - held]
        return read_whole(self._path, lambda: bytes(obstore.get_range(self._objects, self._path, start=start, end=end)))

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)
