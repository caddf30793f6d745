"""A program that produces for a server elsewhere, or consumes from it, loads what that takes, and no table, engine,
web server or server of ours.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.rpc.discovery import read_record

HEAVY = {
    "deltalake",
    "delta",
    "pyspark",
    "airflow",
    "sqlite3",
    "fastapi",
    "rocksdict",
    "confluent_kafka",
    "pulsar",
}
SERVERS = ("node", "coord", "tables", "storage", "operations", "observe", "installation", "commands", "log.server")
PRODUCER = """
import sys
import pyarrow as pa
import millrace
assert {name for name in sys.modules if name.startswith("millrace.")} <= {"millrace.base", "millrace.base.package"}
from millrace.client.database import connect

with connect(sys.argv[1], token=sys.argv[2]) as db:
    producer, things = db.new_producer(), db.definition("things")
    assert "pandas" not in sys.modules  # with the first rows pyarrow itself looks whether they are a DataFrame's
    assert producer.insert(things, pa.table({"id": [1, 2, 3]})).rows == 3
print(*sorted(sys.modules))
"""


CONSUMER = """
import sys
import millrace

with millrace.connect(sys.argv[1], token=sys.argv[2]) as db:
    things = db["things"]
    things.insert([{"id": 1}, {"id": 2}])
    with things.consume(group="readers") as consumer:
        delivery = consumer.poll(timeout=30)
        while not list(delivery.changes()):
            delivery = consumer.poll(timeout=30)
        consumer.acknowledge(delivery)
print(*sorted(sys.modules))
"""

CHANGES = """
import sys
import millrace

with millrace.connect(sys.argv[1], token=sys.argv[2]) as db:
    things = db["things"]
    end = things.insert([{"id": 1}, {"id": 2}]).last_tick
    found = [key for batch in things.changes(until=end) for key in batch.rows["id"].to_pylist()]
    assert sorted(found) == [1, 2]
print(*sorted(sys.modules))
"""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Database]:
    with connect(settings=Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache", pchannels=1)) as made:
        yield made
        made.connection.service.shutdown()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "program", [PRODUCER, CONSUMER, CHANGES], ids=["a producer", "a consumer of a group", "changes"]
)
def test_a_client_of_a_server_elsewhere_loads_no_table_and_no_server(client: Database, program: str) -> None:
    client.catalog.create_collection("things", CollectionSchema((FieldSpec("id", "int64", False),), "id"))
    assert len(client.catalog.pchannels()) == 1, "as the client's settings say, not the server's"
    record = read_record(client.settings.log_path)
    assert record is not None
    command = [sys.executable, "-c", program, record.address, record.token]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    loaded = set(ended.stdout.split())
    assert sorted(loaded & HEAVY) == []
    assert not {name for name in loaded if name.startswith(tuple(f"millrace.{room}" for room in SERVERS))}
