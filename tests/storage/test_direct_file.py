"""A file that is written past the page cache holds what was written, whatever the sizes, with and without O_DIRECT."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.storage import local
from millrace.storage.local import ALIGNMENT, PLAIN_BYTES, DirectFile

SIZES = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 5 * ALIGNMENT)), max_size=8)


def written(path: Path, sizes: list[int]) -> bytes:
    file = DirectFile(path, buffer_bytes=2 * ALIGNMENT, plain_bytes=ALIGNMENT)
    expected = b""
    for number, size in enumerate(sizes):
        part = bytes([number % 251]) * size
        assert file.write(part) == size
        expected += part
        assert file.tell() == len(expected)
    assert file.sync() == len(expected)
    file.close()
    file.close()
    assert path.read_bytes() == expected
    return expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES)
def test_what_was_written_is_there(tmp_path: Path, sizes: list[int]) -> None:
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    written(path, sizes)


def test_a_file_system_that_refuses_direct_writes_gets_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.write, []

    def write(descriptor: int, data: memoryview) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(descriptor, data)

    monkeypatch.setattr(local.os, "write", write)
    written(tmp_path / "file", [3 * ALIGNMENT, 17, ALIGNMENT])
    assert len(refused) == 1, "one refusal is enough"


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(local.os, "write", lambda descriptor, data: real(descriptor, data[:ALIGNMENT]))
    written(tmp_path / "file", [5 * ALIGNMENT, 5])


@pytest.mark.parametrize("plain_bytes", [0, PLAIN_BYTES])
def test_a_full_disk_is_an_error_and_no_silent_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_bytes: int
) -> None:
    def write(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(local.os, "write", write)
    file = DirectFile(tmp_path / "file", plain_bytes=plain_bytes)

    def write_durably() -> None:
        file.write(b"x")
        file.sync()

    with pytest.raises(OSError, match="disk full"):
        write_durably()
    file.close()


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")
