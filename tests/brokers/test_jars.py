"""What a broker is made of: every jar pinned by its digest, nothing transitive."""

from __future__ import annotations

import re

import pytest

from millrace.brokers.jars import read_lock
from millrace.brokers.kinds import KINDS


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_jar_of_a_broker_is_pinned_by_its_digest_and_listed_once(name: str) -> None:
    jars = read_lock(name)
    assert len(jars) > 10
    assert all(re.fullmatch(r"[0-9a-f]{64}", jar.sha256) for jar in jars)
    assert len({jar.file_name for jar in jars}) == len({(jar.organisation, jar.name) for jar in jars}) == len(jars)
