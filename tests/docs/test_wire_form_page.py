"""docs/wire-form.md is complete: a client written from it alone writes and reads, and its tables match the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.message.types import BEHAVIOUR, MessageType
from millrace.node.ingest.definition import ingest_to_end
from millrace.rpc.calls import CATALOG_PREFIX, SERVER_CALLS, server_calls
from millrace.rpc.outcome import OUTCOME_SCHEMA

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "wire-form.md").read_text(encoding="utf-8")
STRANGER = Path(__file__).parent / "stranger.py"


@pytest.mark.slow
def test_a_client_that_knows_the_page_alone_writes_to_the_log_and_reads_it(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")
    with connect(settings=settings) as client:
        try:
            client.catalog.ensure_pchannels(2)
            record = settings.log_path / "server.json"
            done = subprocess.run(
                [sys.executable, "-I", str(STRANGER), str(record)], capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            ingest_to_end(settings, client.log)
            rows = client.collection("strangers").read().to_pylist()
        finally:
            client.connection.service.shutdown()
    assert found["foreign"] == [], "it knows nothing of Millrace"
    assert found["names"] == ["dml_0", "dml_1"]
    assert sorted(key for keys in found["keys"].values() for key in keys) == list(range(20))
    for pair in found["inserted"]:
        assert pair["first"]["reason"] == ""
        assert pair["again"]["reason"] == "DUPLICATE"
        first = pair["first"]
        place = ":".join(str(first[name]) for name in ("ledger", "entry", "index", "ordinal"))
        assert pair["again"]["detail"] == f"{place}@{first['time_tick']}"
    assert [each["reason"] for each in (*found["deleted"], *found["transaction"])] == [""] * 4
    assert found["refused"] == ["WRONG_VCHANNEL", "SEQUENCE_GAP"]
    assert found["takeover"] == ["", "PRODUCER_FENCED"]
    assert found["confirmed"]
    assert found["tail_confirmed"]
    assert found["mvcc"]["confirmed"]
    assert {"CREATE_COLLECTION", "INSERT", "DELETE", "COMMIT_TXN"} <= {kind for kind, *_ in found["tail"]}
    assert found["log"]["framed"]
    assert found["log_end"]
    assert found["errors"]["collection"] == "COLLECTION_NOT_FOUND"
    assert found["errors"]["append"]["status"] == 2
    assert found["errors"]["append"]["error"]["code"] == "ENTRY_TOO_LARGE"
    assert found["errors"]["token"] == "UNAUTHENTICATED"
    written = sorted((row["id"], row["name"]) for row in rows)
    [first, *_] = next(iter(found["keys"].values()))
    assert written == sorted([*((key, f"row {key}") for key in range(20)), (first, f"row {first}")])


def cells(heading: str) -> list[list[str]]:
    """Return the rows of the first table after a line of the page."""
    behind = PAGE[PAGE.index(heading) :]
    lines = re.search(r"^\|.*\n\|-+.*\n((?:\|.*\n)+)", behind, re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1].splitlines()]


def test_the_table_of_types_has_every_type_with_behaviour_and_its_number() -> None:
    table = {row[1]: int(row[0]) for row in cells("## Type numbers and header fields")}
    assert table == {kind.name: int(kind) for kind in BEHAVIOUR}
    silent = re.search(r"The other numbers of Milvus' `MsgType` \(([^)]*)\)", " ".join(PAGE.split()))
    assert silent is not None
    named = set()
    for part in silent[1].replace(" and ", ", ").split(", "):
        first, _, last = part.partition(" to ")
        named |= set(range(int(first), int(last or first) + 1))
    without = {int(kind) for kind in MessageType} - {int(kind) for kind in BEHAVIOUR} - {0}
    assert without == named & {int(kind) for kind in MessageType}
    assert not named & {int(kind) for kind in BEHAVIOUR}


def test_the_coordinators_calls_and_the_columns_of_an_answer_are_those_of_the_code() -> None:
    rows = {CATALOG_PREFIX + row[0].strip("`"): row for row in cells("**DDL goes through the coordinator**")}
    assert rows.keys() == {call.key for call in server_calls(CATALOG_PREFIX)}
    rows |= {row[0].strip("`"): row for row in cells("**Actions**")}
    for name, (_, request, *_) in rows.items():
        call = SERVER_CALLS[name]
        named = set(re.findall(r"`(\w+)`" if name.startswith(CATALOG_PREFIX) else r'"(\w+)"', request))
        required = {each for each in call.request if not each.endswith("?")}
        assert required <= named <= call.arguments, f"the page and the registry differ about the request of {name}"
    answer = PAGE[PAGE.index("- a record batch, one row a message") :].split("\n- ")[0]
    assert set(OUTCOME_SCHEMA.names) == set(re.findall(r"`(\w+)`", answer))
