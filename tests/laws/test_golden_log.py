"""A chain version is what its golden log says: a change of behaviour fails here and needs a version of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.message.types import BEHAVIOUR
from millrace.wal.chain import CHAIN_VERSION, CHAIN_VERSIONS
from millrace.wal.reasons import Reason
from tests.laws.golden_log import FOLDER, PATH, as_written, described, features, main, read_golden
from tests.laws.parts import SAYS
from tests.laws.real import run

POLICIES = (
    *("capacity", "rows", "lifetime", "idle", "blocking_deletes", "manual", "flush_all"),
    *("schema_change", "drop_partition", "drop_collection", "import"),
)
DIGESTS = """
from tests.laws.golden_log import as_written, read_golden, state_digest, rows_digest
from tests.laws.real import run
for log in read_golden():
    ran = run(as_written(log))
    print(rows_digest(ran.rows), state_digest(ran.state))
"""


GOLDEN = {version: read_golden(FOLDER / f"chain-v{version}.json") for version in CHAIN_VERSIONS}


@pytest.mark.parametrize(
    ("version", "number"), [(version, number) for version, logs in GOLDEN.items() for number in range(len(logs))]
)
def test_the_chain_makes_of_the_golden_log_of_a_version_what_it_made_then(version: int, number: int) -> None:
    golden = GOLDEN[version][number]
    written = as_written(golden)
    now = described(written, run(written))
    for place, (then, entry) in enumerate(zip(golden["entries"], now["entries"], strict=True), 1):
        assert entry["rows"] == then["rows"], f"entry {place}"
        assert entry["digest"] == then["digest"], f"entry {place}: a column differs"
    assert now["state"] == golden["state"]


def test_the_golden_log_shows_each_type_reason_and_policy() -> None:
    shown = set[str]().union(*(features(log) for log in read_golden()))
    assert set(SAYS) <= {op for each in shown if each.startswith("SCHEMA_CHANGE ") for op in each.split()[1:]}
    types = {kind.name for kind in BEHAVIOUR} - {"FLUSH"}
    assert types | {f"!{reason}" for reason in Reason} | {f"FLUSH {policy}" for policy in POLICIES} <= shown
    assert {"ROLLBACK_TXN expired", "ROLLBACK_TXN barrier"} <= shown


def test_the_golden_log_of_a_version_is_written_once() -> None:
    assert PATH.name == f"chain-v{CHAIN_VERSION}.json"
    with pytest.raises(SystemExit, match="CHAIN_VERSION"):
        main()


def test_another_process_with_another_hash_seed_gives_the_same_rows_and_state() -> None:
    root = Path(__file__).resolve().parents[2]
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(root / "include"), str(root)])}
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS], env=env, capture_output=True, text=True, check=True, cwd=root
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert "".join(found).count("\n") == len(read_golden())
