"""A load of files that is killed, again and again, and begun again with the same words: each row is there once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

import millrace.testing
from millrace.base.deadline import Deadline, poll_until
from millrace.base.failpoint import VARIABLE

ROWS = 600


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_load_that_is_killed_and_begun_again_has_each_row_once(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    files = tmp_path / "files"
    files.mkdir()
    lines = [json.dumps({"id": number, "name": f"row {number}"}) for number in range(ROWS // 2)]
    lines[7] = '{"id": "x"}'
    (files / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rest = list(range(ROWS // 2, ROWS))
    parquet.write_table(pa.table({"id": rest, "name": [f"row {number}" for number in rest]}), files / "b.parquet")
    journal, bad = tmp_path / "load.journal", tmp_path / "bad.jsonl"
    with millrace.testing.deployment(tmp_path / "data") as db:
        rows = db.create_collection("rows", {"id": "int64", "name": "string?"}, key="id", vchannels=2)
        command = [
            sys.executable, "-m", "millrace", "produce", "rows", str(files), "--batch-rows", "50", "--bad-rows",
            str(bad),
            "--resume", str(journal), "--data", str(db.settings.data_dir), "--json",
        ]  # fmt: skip

        def run(failpoint: str = "") -> subprocess.CompletedProcess[str]:
            env = os.environ | {VARIABLE: failpoint, "MILLRACE_CACHE": str(db.settings.cache_dir)}
            return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

        for _ in range(3):
            place = dice.choice(["produce.sent", "produce.kept"])
            assert run(f"{place}@{dice.randint(1, 4)}").returncode == -9
        began = json.loads(journal.read_text())["place"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            poll_until(
                lambda: json.loads(journal.read_text())["place"] != began or process.poll() is not None,
                Deadline.after(60),
                interval=dice.uniform(0.0005, 0.01),
            )
            process.kill()
        ended = run()
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["accepted"] == ROWS - 1
        again = run()
        assert json.loads(again.stdout)["accepted"] == ROWS - 1, "a load that is done does nothing"
        db.settle()
        found = Counter(rows.read()["id"].to_pylist())
        assert found == Counter(number for number in range(ROWS) if number != 7)
        told = [json.loads(line) for line in bad.read_text().splitlines()]
        assert [(each["line"], each["column"], each["value"]) for each in told] == [(8, "id", "x")]
        (files / "a.jsonl").write_text("{}", encoding="utf-8")
        changed = run()
        assert changed.returncode == 1
        assert "belongs to another load: files was" in changed.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed_at",
    [
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("produce.forgotten@1", marks=pytest.mark.slow),
        "produce.renumbered@1",
    ],
)
def test_a_load_whose_producer_the_chain_forgot_goes_on_by_the_wal(tmp_path: Path, killed_at: str) -> None:
    count = 300
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(f'{{"id": {number}}}\n' for number in range(count)), encoding="utf-8")
    journal = tmp_path / "load.journal"
    with millrace.testing.deployment(tmp_path / "data", pchannels=2) as db:
        rows = db.create_collection("rows", {"id": "int64"}, key="id", vchannels=2)
        command = [
            sys.executable, "-m", "millrace", "produce", "rows", str(source), "--batch-rows", "50",
            "--resume", str(journal), "--data", str(db.settings.data_dir), "--json",
        ]  # fmt: skip

        def run(failpoint: str = "") -> subprocess.CompletedProcess[str]:
            env = os.environ | {VARIABLE: failpoint, "MILLRACE_CACHE": str(db.settings.cache_dir)}
            with subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as process:
                end = Deadline.after(60)
                while process.poll() is None and not end.expired():
                    db.settle()  # the load waits for the WAL to have what it sent
                    end.pause(0.05)
                process.kill()
                assert process.stdout is not None
                assert process.stderr is not None
                out, err = process.stdout.read(), process.stderr.read()
            return subprocess.CompletedProcess(command, process.returncode, out, err)

        def forget(first: int) -> None:
            """Have the chain forget every producer but the one that appends now."""
            catalog = db.catalog
            for each in catalog.pchannels():
                catalog.open_term(each.name, config={"max_producers": 1})
            with db.new_producer() as other:
                other.insert(rows.definition, pa.table({"id": list(range(first, first + 20))}))
            for each in catalog.pchannels():
                catalog.open_term(each.name, config={"max_producers": 1024})

        assert run("produce.sent@3").returncode == -9  # what was sent is not in the journal
        forget(1_000)
        if killed_at:
            assert run(killed_at).returncode == -9
            forget(2_000)
        ended = run()
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["accepted"] == count
        db.settle()
        found = Counter(number for number in rows.read()["id"].to_pylist() if number < 1_000)
        assert found == Counter(range(count))
