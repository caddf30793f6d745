"""Delta's jars: fetched once and whole, checked by digest, by one process at a time, within a deadline."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.base.errors import DeadlineExceeded, InvalidSettings
from millrace.base.settings import Settings
from millrace.runtime import jars
from millrace.runtime.spark import jars as spark_jars
from millrace.runtime.spark.jars import JARS, delta_jars, jars_folder

# An Ivy of our own: a shell script in place of java, which writes a file for each dependency of the module.
FAKE_JAVA = """#!/bin/sh
while [ $# -gt 0 ]; do
    case "$1" in
        -ivy) module=$2 ;;
        -retrieve) pattern=$2 ;;
    esac
    shift
done
echo called >>"{calls}"
folder=${{pattern%/*}}
mkdir -p "$folder"
sed -n 's/.* name="\\([^"]*\\)" rev="\\([^"]*\\)".*/\\1-\\2/p' "$module" | while read -r name; do
    printf '%s' "$name" >"$folder/$name.jar"
done
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, Path]:
    """Settings with an empty cache, jars whose content is their name, and the file that counts Ivy's calls."""
    calls = tmp_path / "calls"
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(FAKE_JAVA.format(calls=calls))
    java.chmod(0o755)
    monkeypatch.setattr(jars, "find_java", lambda: tmp_path / "java")
    pinned = [jar._replace(sha256=hashlib.sha256(f"{jar.name}-{jar.version}".encode()).hexdigest()) for jar in JARS]
    monkeypatch.setattr(spark_jars, "JARS", tuple(pinned))
    return Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache"), calls


def test_jars_are_fetched_once(fake: tuple[Settings, Path]) -> None:
    settings, calls = fake
    first = delta_jars(settings)
    assert [Path(path).name for path in first] == [jar.file_name for jar in JARS]
    assert all(Path(path).is_file() for path in first)
    assert delta_jars(settings) == first
    assert calls.read_text().count("called") == 1


def test_a_jar_that_somebody_deleted_is_fetched_again(fake: tuple[Settings, Path]) -> None:
    settings, calls = fake
    Path(delta_jars(settings)[0]).unlink()
    assert all(Path(path).is_file() for path in delta_jars(settings))
    assert calls.read_text().count("called") == 2


def test_a_jar_with_another_digest_is_refused_and_nothing_is_kept(
    fake: tuple[Settings, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = fake
    monkeypatch.setattr(spark_jars, "JARS", (*spark_jars.JARS[:-1], JARS[-1]))
    with pytest.raises(InvalidSettings, match="another SHA-256"):
        delta_jars(settings)
    assert not jars_folder(settings).exists()
    assert [path.name for path in jars_folder(settings).parent.iterdir()] == [f"{jars_folder(settings).name}.lock"]


def test_a_process_waits_for_the_one_that_fetches_and_not_for_ever(fake: tuple[Settings, Path]) -> None:
    settings, calls = fake
    folder = jars_folder(settings)
    folder.parent.mkdir(parents=True)
    with (folder.parent / f"{folder.name}.lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DeadlineExceeded, match="another process holds"):
            delta_jars(settings, deadline=0.2)
    assert not calls.exists()
    assert delta_jars(settings)


def test_pins_are_digests_and_names_are_distinct() -> None:
    assert all(len(jar.sha256) == 64 for jar in JARS)
    assert len({jar.file_name for jar in JARS}) == len(JARS)


def test_the_former_module_still_runs_and_names_the_new_one() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "millrace.runtime.spark_jars"],
        env=os.environ | {"MILLRACE_DATE": "no setting"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "DeprecationWarning: millrace.runtime.spark_jars is now millrace.runtime.spark.jars" in ended.stderr
    assert "INVALID_SETTINGS: MILLRACE_DATE is not a setting" in ended.stderr
