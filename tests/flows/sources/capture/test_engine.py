"""The engine's jar: its bytes are what its source compiles to, and its libraries are pinned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from millrace.flows.sources.capture import engine
from millrace.flows.sources.capture.engine import bound_log, debezium_lock, server_number

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / "include" / "millrace" / "flows" / "sources" / "capture"


def test_the_jar_is_made_of_its_source(tmp_path: Path) -> None:
    """The jar names the digest of the source; another version of the compiler may write other bytes."""
    made, ours = tmp_path / "made.jar", FOLDER / "java" / "capture-engine.jar"
    subprocess.run([ROOT / "tools" / "capture_jar.sh", sys.executable, str(made)], check=True, timeout=110)
    with ZipFile(made) as new, ZipFile(ours) as old:
        assert new.namelist() == old.namelist()
        assert new.read("META-INF/source.sha256") == old.read("META-INF/source.sha256"), "run tools/capture_jar.sh"


def test_every_jar_is_pinned_by_its_digest_and_listed_once() -> None:
    jars = debezium_lock()
    assert all(re.fullmatch(r"[0-9a-f]{64}", jar.sha256) for jar in jars)
    assert len({jar.file_name for jar in jars}) == len(jars) > 10


def test_flows_have_numbers_of_their_own() -> None:
    numbers = [server_number(f"millrace-{each}") for each in range(1000)]
    assert len(set(numbers)) == 1000
    assert min(numbers) > 1_000_000
    assert max(numbers) < 1 << 32


def test_the_log_of_an_engine_that_runs_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with log.open("ab") as output:
        for number in range(40):
            output.write(b"%02d" % number + b"x" * (1 << 20))
            output.flush()
            bound_log(log)
        output.write(b"the end")
    kept = [each.stat().st_size for each in tmp_path.iterdir()]
    assert len(kept) == 2
    assert sum(kept) < 40 << 20
    assert log.read_bytes().endswith(b"the end")
    assert b"\0" not in log.read_bytes()


def test_a_reason_is_the_last_cause_that_says_something() -> None:
    causes = ["org.E: it stopped", "org.P: no viable alternative at input 'x'", "org.antlr.N: null"]
    assert engine._reason({"causes": causes}).endswith("no viable alternative at input 'x'")
    assert engine._reason({"causes": ["java.E: null"]}).endswith("java.E: null")
    assert engine._reason({"message": "gone"}).endswith("gone")
