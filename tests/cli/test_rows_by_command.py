"""produce, read and scan: rows go in, come out as of any moment, and what was refused is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from millrace.commands import produce
from millrace.commands.parts.command_line import find_collection
from millrace.tables.read import freshness
from tests.cli.deployment import Deployment
from tests.client.conftest import streaming_node

ADA, BOB = {"id": 1, "name": "Ada", "at": "2026-11-21T10:00:00.000000Z"}, {"id": 2, "name": "Bob", "at": None}


@pytest.fixture
def users(shared: Deployment) -> Deployment:
    """The module's deployment with an empty collection ``users``, the partitions eu and us."""
    for each in shared.as_json("collections", "list"):
        shared.ok("collections", "drop", each["name"], "--yes")
    shared.create_users("--partition", "eu", "--partition", "us", "--vchannels", "2")
    return shared


def _rows(deployment: Deployment, *arguments: str) -> list[dict[str, Any]]:
    return sorted(deployment.lines("read", "users", "--json", *arguments), key=lambda row: int(row["id"]))


def _put(deployment: Deployment, *rows: dict[str, Any], partition: str = "eu") -> Any:
    text = "\n".join(json.dumps(row) for row in rows)
    return deployment.as_json("produce", "users", "-", "--partition", partition, stdin=text)


@pytest.mark.slow
def test_rows_come_out_as_of_any_moment_with_deletes_applied(users: Deployment) -> None:
    first = _put(users, ADA, BOB)
    gone = users.as_json("produce", "users", str(users.file("gone.csv", "id\n2\n7\n")), "--delete")
    assert (first["accepted"], gone["accepted"]) == (2, 2)
    users.catch_up(flush=False)
    assert _rows(users) == [ADA]
    assert _rows(users, "--at", str(first["last_tick"])) == [ADA, BOB]
    users.catch_up()
    assert _rows(users, "--at", str(first["last_tick"]), "--columns", "id,name") == [
        {"id": 1, "name": "Ada"},
        {"id": 2, "name": "Bob"},
    ]
    users.fails("TICK_NOT_REACHED", "read", "users", "--at", "2999-01-01", "--wait", "0")
    users.fails("COLLECTION_NOT_FOUND", "read", "users", "--at", "2001-01-01")
    users.fails("INVALID_ARGUMENT", "read", "users", "--columns", "id,age")


def test_rows_of_keys_are_printed_as_a_read_prints_them(users: Deployment) -> None:
    first = _put(users, ADA, BOB)
    users.catch_up()
    _put(users, {"id": 2, "name": "Bo"}, partition="us")
    users.catch_up(flush=False)
    assert users.lines("get", "users", "1", "7", "--json") == [ADA]
    found = users.lines("get", "users", "2", "--columns", "name", "--json")
    assert sorted(each["name"] for each in found) == ["Bo", "Bob"], "a key may have several rows"
    assert users.lines("get", "users", "2", "--at", str(first["last_tick"]), "--json") == [BOB]
    assert "Ada" in users.ok("get", "users", "1")
    assert "id int64" in users.fails("INVALID_ARGUMENT", "get", "users", "x")
    users.fails("COLLECTION_NOT_FOUND", "get", "nobody", "1")


def test_what_happened_to_a_key_is_printed_oldest_first(users: Deployment) -> None:
    first = _put(users, ADA, BOB)
    users.catch_up()
    later = str(_put(users, {"id": 2, "name": "Bo"})["last_tick"])
    users.catch_up(flush=False)
    found = users.lines("history", "users", "2", "--columns", "name", "--json")
    assert [(each["_change"], each["name"]) for each in found] == [("insert", "Bob"), ("insert", "Bo")]
    tick = str(first["last_tick"])
    assert [each["name"] for each in users.lines("history", "users", "2", "--after", tick, "--json")] == ["Bo"]
    assert [each["name"] for each in users.lines("history", "users", "2", "--until", tick, "--json")] == ["Bob"]
    assert "insert" in users.ok("history", "users", "2")
    assert "there is no history after" in users.fails(
        "INVALID_ARGUMENT", "history", "users", "2", "--after", later, "--until", tick
    )


def test_a_collection_that_the_wal_does_not_have_yet_says_what_to_do(
    users: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No rows" in users.ok("read", "users"), "the append host knows it"
    monkeypatch.setattr(freshness, "DECIDED_BYTES", 0)
    with streaming_node(users.settings):
        words = users.fails("COLLECTION_NOT_FOUND", "read", "users", "--wait", "0.1")
    assert "millrace jobs run" in words


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_what_read_writes_produce_takes(users: Deployment, suffix: str) -> None:
    _put(users, ADA, BOB)
    users.catch_up(flush=False)
    path = users.settings.data_dir.parent / f"rows.{suffix}"
    users.ok("read", "users", "--output", str(path))
    users.ok("collections", "create", "copies", "--from", str(path), "--key", "id", "--field", "at:timestamp?")
    assert users.as_json("produce", "copies", str(path))["accepted"] == 2
    users.catch_up(flush=False)
    found = sorted(users.lines("read", "copies", "--json"), key=lambda row: int(row["id"]))
    assert found == [ADA, BOB]


def test_a_table_is_cut_and_says_so_and_other_formats_are_whole(users: Deployment) -> None:
    _put(users, *({"id": number} for number in range(60)))
    users.catch_up(flush=False)
    assert "50 of 60 rows" in users.ok("read", "users")
    assert "2 of 60 rows" in users.ok("read", "users", "--limit", "2")
    assert len(users.lines("read", "users", "--json")) == 60
    assert users.ok("read", "users", "--format", "csv", "--limit", "0") == "id,name,at\n"
    path = users.settings.data_dir.parent / "rows.bin"
    users.fails("INVALID_ARGUMENT", "read", "users", "--output", str(path))
    users.ok("read", "users", "--format", "parquet", "--output", str(path))
    assert parquet.read_table(path).num_rows == 60


def test_each_row_goes_to_the_partition_that_its_column_names(users: Deployment) -> None:
    rows = '{"id": 1, "name": "eu"}\n{"id": 2, "name": "us"}\n{"id": 3, "name": "mars"}\n'
    options = ("--partition-by", "name", "--on-error", "skip")
    found = users.as_json("produce", "users", "-", *options, stdin=rows)
    assert (found["accepted"], found["skipped"]) == (2, 1)
    inserts = users.lines("scan", "dml_0", "--types", "INSERT") + users.lines("scan", "dml_1", "--types", "INSERT")
    assert sorted(each["partition_id"] for each in inserts if each["collection_id"] == _id(users)) == [1, 2]
    users.fails("INVALID_ARGUMENT", "produce", "users", "-", "--partition-by", "at", stdin=rows)
    users.fails("INVALID_ARGUMENT", "produce", "users", "-", "--partition", "mars", stdin=rows)
    assert "--partition" in users.fails("INVALID_ARGUMENT", "produce", "users", "-", stdin=rows)


def test_a_bad_row_stops_before_its_batch_is_sent_and_says_what_is_in(users: Deployment) -> None:
    text = '{"id": 1}\n{"id": 2}\n{"id": 3}\n{"id": "x"}\n'
    options = ("produce", "users", "-", "--partition", "eu", "--batch-rows", "2")
    words = users.fails("INVALID_ARGUMENT", *options, stdin=text)
    assert "line 4: id: 'x' is not int64" in words
    assert "everything up to line 2 was sent" in words
    users.catch_up(flush=False)
    assert [row["id"] for row in _rows(users)] == [1, 2]


def test_an_error_before_the_first_batch_stands_alone(users: Deployment) -> None:
    result = users.run("produce", "users", "-", "--partition", "eu", stdin='{"id": 1, "name": }\n')
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "line 1: it is not JSON at character 19" in result.stderr
    sent = users.run("produce", "users", "-", "--partition", "eu", "--batch-rows", "1", stdin='{"id": 1}\nnot\n')
    assert sent.stdout.startswith("Accepted 1 row in 1 message")


def test_a_read_without_a_job_takes_from_the_log_what_the_tables_lack(
    users: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(users, ADA)
    users.catch_up()
    _put(users, BOB)
    read = users.run("read", "users", "--json")
    assert (read.exit_code, len(read.stdout.splitlines()), read.stderr) == (0, 2, "")
    monkeypatch.setattr(freshness, "DECIDED_BYTES", 0)
    with streaming_node(users.settings):  # which is behind
        read = users.run("read", "users", "--json", "--wait", "0.1")
    assert (read.exit_code, len(read.stdout.splitlines())) == (0, 1)
    assert "Not the newest: the log has rows on dml_" in read.stderr


def test_a_read_before_the_collection_blames_no_job(users: Deployment) -> None:
    _put(users, {"id": 1})
    users.catch_up()
    for moment in ("2020-01-01", "1"):
        words = users.fails("COLLECTION_NOT_FOUND", "read", "users", "--at", moment)
        assert "users was not there at" in words
        assert "job" not in words


def test_a_scan_of_a_collection_names_its_channels(users: Deployment) -> None:
    words = users.fails("CHANNEL_NOT_FOUND", "scan", "users")
    assert "users' is a collection; scan one of its channels: dml_" in words


def test_skipped_rows_are_told_counted_and_lose_no_other(users: Deployment) -> None:
    text = "".join(f'{{"id": {number}}}\n{{"id": "x"}}\n' for number in range(30))
    result = users.run("produce", "users", "-", "--partition", "eu", "--on-error", "skip", "--json", stdin=text)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["accepted"], found["skipped"], found["last_line"]) == (30, 30, 60)
    assert result.stderr.startswith("line 2: id: 'x' is not int64\nline 4: ")
    assert len(result.stderr.splitlines()) == 21
    users.catch_up(flush=False)
    assert len(_rows(users)) == 30


def test_what_the_chain_rejects_is_told_by_reason_and_can_be_looked_up(
    users: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = dataclasses.replace(find_collection(users.settings, "users"), partitions={"eu": 99})
    monkeypatch.setattr(produce, "find_collection", lambda settings, name: stale)
    result = users.run("produce", "users", "-", "--json", stdin='{"id": 1}\n{"id": 2}\n{"id": 3}\n')
    assert result.exit_code == 1
    assert json.loads(result.stdout)["rejected"] == {"PARTITION_NOT_FOUND": 3}
    assert result.stderr.startswith("APPEND_REJECTED: ")
    users.catch_up(flush=False)
    collection = _id(users)
    found = [
        each
        for each in users.as_json("wal", "rejections", "--reason", "partition_not_found")
        if each["collection_id"] == collection
    ]
    assert sum(each["rows"] for each in found) == 3
    assert {each["type"] for each in found} == {"INSERT"}
    assert all(each["producer_id"] and each["detail"] and each["id"].count(":") == 3 for each in found)
    counts = {each["reason"]: each["messages"] for each in users.as_json("wal", "rejections", "--counts")}
    assert counts["PARTITION_NOT_FOUND"] >= len(found)
    assert users.as_json("wal", "rejections", "--reason", "TERM_FENCED") == []
    assert len(users.as_json("wal", "rejections", "--limit", "1")) == 1


def test_a_file_that_is_not_there_or_has_no_known_suffix_is_an_error(users: Deployment) -> None:
    users.fails("INVALID_ARGUMENT", "produce", "users", "nowhere.csv", "--partition", "eu")
    users.fails("INVALID_ARGUMENT", "produce", "users", str(users.file("rows.txt", "")), "--partition", "eu")
    found = users.as_json("produce", "users", str(users.file("none.jsonl", "")), "--partition", "eu")
    assert found["accepted"] == 0


def test_a_scan_begins_where_it_is_told_to_and_shows_what_messages_carry(users: Deployment) -> None:
    home = find_collection(users.settings, "users").vchannels[0]
    _put(users, *({"id": number, "name": "n"} for number in range(20)))
    users.catch_up(flush=False)
    _put(users, *({"id": number} for number in range(20, 40)), partition="us")
    units = users.lines("scan", home, "--rows")
    of_collection = [each for each in units if each.get("collection_id") == _id(users)]
    assert of_collection[0]["type"] == "CREATE_COLLECTION"
    assert of_collection[0]["payload"]["schema"]["primary_key"] == "id"
    ticks = [each["time_tick"] for each in units]
    assert ticks == sorted(set(ticks))
    inserts = [each for each in units if each["type"] == "INSERT"]
    assert {row["name"] for each in inserts[:1] for row in each["payload"]} == {"n"}
    first, second = inserts
    assert users.lines("scan", home, "--types", "insert", "--from", second["id"], "--rows") == [second]
    assert users.lines("scan", home, "--types", "INSERT", "--from", f"tick:{first['time_tick']}", "--rows") == [second]
    assert users.lines("scan", home, "--types", "INSERT,DELETE", "--limit", "1", "--rows") == [first]
    assert users.lines("scan", home, "--from", "latest") == []
    assert "dml_0" in users.fails("CHANNEL_NOT_FOUND", "scan", "dml_9")


def test_a_transaction_is_one_line_with_its_messages(users: Deployment) -> None:
    import pyarrow as pa

    from millrace.client.database import connect
    from millrace.message.keys import vchannel_index

    with connect(settings=users.settings) as client:
        collection = client.definition("users")
        ids = [number for number in range(20) if vchannel_index(pa.array([number]), 2)[0] == 0]
        with client.new_producer().transaction(collection, vchannel=0) as txn:
            txn.insert(pa.table({"id": ids}), partition="eu")
            txn.delete(ids[:1])
    [unit] = [each for each in users.lines("scan", collection.vchannels[0], "--rows") if each["type"] == "TXN"]
    assert [each["type"] for each in unit["messages"]] == ["INSERT", "DELETE"]
    assert unit["messages"][1]["payload"] == [{"id": ids[0]}]


def _id(deployment: Deployment) -> int:
    return find_collection(deployment.settings, "users").id


def test_a_file_in_a_folder_of_another_kind_is_told(users: Deployment, tmp_path: Path) -> None:
    users.fails("INVALID_ARGUMENT", "produce", "users", str(tmp_path), "--partition", "eu", "--format", "csv")
    users.catch_up(flush=False)
    users.fails("INVALID_ARGUMENT", "read", "users", "--output", str(tmp_path / "no" / "rows.csv"))


def test_a_load_that_makes_its_collection_asks_what_a_key_that_comes_again_does(shared: Deployment) -> None:
    file = str(shared.file("things.csv", "id,name\n1,Ada\n2,Bob\n"))
    words = shared.fails("INVALID_ARGUMENT", "produce", "things", file, "--create", "--key", "id")
    assert "--on-duplicate replace" in words
    assert "things" not in {each["name"] for each in shared.as_json("collections", "list")}
    chosen = ("--create", "--key", "id", "--on-duplicate", "replace")
    for _ in range(2):
        assert shared.as_json("produce", "things", file, *chosen)["accepted"] == 2
    shared.as_json("produce", "things", file, "--create", "--key", "id")  # it is there: nothing is asked
    shared.ok("produce", "both", file, *chosen[:-1], "keep")
    words = shared.fails("INVALID_ARGUMENT", "produce", "both", file, *chosen)
    assert "--on-duplicate keep, which cannot change" in words
    shared.as_json("produce", "both", file, "--upsert")
    changed = str(shared.file("changed.csv", "id,name\n2,Bea\n3,Cid\n"))
    shared.as_json("produce", "both", changed, "--upsert")
    shared.catch_up()
    rows = {
        name: sorted((int(row["id"]), row["name"]) for row in shared.lines("read", name, "--json"))
        for name in ("things", "both")
    }
    assert rows == {"things": [(1, "Ada"), (2, "Bob")], "both": [(1, "Ada"), (2, "Bea"), (3, "Cid")]}


def test_an_upsert_that_is_resumed_doubles_nothing(shared: Deployment, tmp_path: Path) -> None:
    shared.ok("collections", "create", "upserted", "--field", "id:int64", "--field", "name:string?", "--key", "id")
    file, journal = str(shared.file("upserted.csv", "id,name\n1,Ada\n2,Bob\n")), str(tmp_path / "load.journal")
    for _ in range(2):
        shared.ok("produce", "upserted", file, "--upsert", "--batch-rows", "1", "--resume", journal)
    shared.fails("INVALID_ARGUMENT", "produce", "upserted", file, "--batch-rows", "1", "--resume", journal)
    shared.catch_up()
    assert sorted(int(row["id"]) for row in shared.lines("read", "upserted", "--json")) == [1, 2]
