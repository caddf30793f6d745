"""What a broker is made of: every jar pinned by its digest, nothing transitive."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millrace.base.errors import InvalidSettings
from millrace.brokers.jars import read_lock
from millrace.brokers.opensearch import _needs_compiler
from millrace.brokers.registry import LOG_BROKERS, SINK_SERVERS


@pytest.mark.parametrize("name", sorted(LOG_BROKERS | SINK_SERVERS))
def test_every_jar_of_a_broker_is_pinned_by_its_digest_and_listed_once(name: str) -> None:
    jars = read_lock(name)
    assert len(jars) > 10
    assert all(re.fullmatch(r"[0-9a-f]{64}", jar.sha256) for jar in jars)
    assert len({jar.file_name for jar in jars}) == len({(jar.organisation, jar.name) for jar in jars}) == len(jars)


def test_a_java_without_a_compiler_is_told_before_opensearch_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho java.base@17.0.1\n")
    java.chmod(0o755)
    (tmp_path / "release").write_text('JAVA_VERSION="17.0.1"\n')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(InvalidSettings, match="jdk"):
        _needs_compiler()
