"""Azure's blobs by Azurite, which npm installs once: the promises of every store, and a deployment's commits."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

import millrace.testing
from millrace.base.settings import Settings
from millrace.brokers.server import free_ports
from millrace.storage import objects
from millrace.storage.store import TableStore, store_at
from millrace.storage.table import create_table, table_at
from tests.storage.test_objects import (
    SCHEMA,
    _commit,
    test_a_file_is_taken_from_another_store,
    test_a_file_is_there_as_a_whole_once_it_is_synced,
    test_a_small_file_is_replaced_as_a_whole_and_what_lies_below_is_listed,
    test_a_table_is_made_by_one_of_several_and_opened_at_any_version,
    test_of_several_writers_of_one_name_one_wins,
)
from tests.waiting import until

__all__ = [
    "test_a_file_is_taken_from_another_store",
    "test_a_file_is_there_as_a_whole_once_it_is_synced",
    "test_a_small_file_is_replaced_as_a_whole_and_what_lies_below_is_listed",
    "test_a_table_is_made_by_one_of_several_and_opened_at_any_version",
    "test_of_several_writers_of_one_name_one_wins",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VERSION = "3.35.0"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which its manual names."""


def azurite() -> Path:
    """Return the program in the cache folder; install it first if it is not there."""
    folder = Settings.load().cache_dir / "programs" / f"azurite-{VERSION}"
    program = folder / "node_modules/.bin/azurite-blob"
    if not program.exists():
        if shutil.which("npm") is None:
            pytest.skip("this machine has no npm, which installs Azurite")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"azurite@{VERSION}"]
        subprocess.run(command, check=True, capture_output=True, timeout=400)
    return program


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    command = [str(azurite()), "--silent", "--location", str(tmp_path_factory.mktemp("azurite"))]
    command += ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--skipApiVersionCheck"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status > 0
        except OSError:
            return False
        finally:
            connection.close()

    until(lambda: answers() or server.poll() is not None, "Azurite answers", seconds=60)
    yield f"127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.fixture
def box(address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a place in a new container."""
    name = f"box-{uuid.uuid4().hex}"
    path, now = f"/{ACCOUNT}/{name}", datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    lines = ["PUT", *[""] * 11, f"x-ms-date:{now}", "x-ms-version:2021-08-06", f"/{ACCOUNT}{path}", "restype:container"]
    digest = hmac.new(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
    headers = {"x-ms-date": now, "x-ms-version": "2021-08-06", "Content-Length": "0"}
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("PUT", f"{path}?restype=container", headers=headers)
    assert connection.getresponse().status == 201
    connection.close()
    for variable, value in {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": f"http://{address}",
    }.items():
        monkeypatch.setenv(variable, value)
    return f"az://{name}/some/where"


@pytest.fixture
def store(box: str) -> TableStore:
    return store_at(f"{box}/t")


def test_racing_writers_commit_each_version_once(box: str) -> None:
    create_table(box, SCHEMA, partition_by=[])

    def writer(name: str) -> None:
        for number in range(5):
            assert _commit(box, name, number)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(writer, ["a", "b"]))
    table = table_at(box)
    assert table.version == 10
    assert sorted(table.dataset().to_table()["id"].to_pylist()) == sorted([*range(5)] * 2)


def test_a_deployment_has_its_tables_there(box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    with millrace.testing.deployment(tmp_path / "data", tables=box) as db:
        users = db.create_collection("users", {"id": "int64", "name": "string"}, key="id")
        users.insert([{"id": number, "name": str(number)} for number in range(100)])
        db.settle(deadline=60)
        users.delete_where("id < 10")
        db.settle(deadline=60)
        assert users.read(order_by="id")["id"].to_pylist() == list(range(10, 100))
    assert not list((tmp_path / "data").rglob("*.parquet"))
    large = store_at(box).put("large")
    large.write(b"x" * (3 * objects.PART_BYTES))
    assert large.sync() == store_at(box).size("large")
    large.close()
