"""The engine's jar: its bytes are what its source compiles to, and its libraries are pinned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from millrace.flows.sources.capture.engine import debezium_lock, server_number

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
