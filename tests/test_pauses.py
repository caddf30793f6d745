"""Attempts that failed at one moment are spread, and none comes before its time."""

from __future__ import annotations

import re
from pathlib import Path

from millrace.base.pauses import SPREAD, jittered

RETRIES = re.compile(
    r"(?:wait|sleep|pause)\((?:self\.)?_?(?:settings\.)?(?:append_)?(?:retry_delay|_PAUSE|pause|delay)\)"
)
PACKAGE = Path(__file__).parent.parent / "include" / "millrace"
ALONE = {
    "client/produce/transaction.py",
    "client/tables_served.py",
    "log/kafka/service.py",
    "node/append/follower.py",
    "runtime/periodic.py",
    "installation/keeper.py",
}
"""What waits there is no second attempt (a poll of its own, a lease's renewal), or has nobody beside it that fails with it."""


def test_a_pause_is_at_least_what_was_asked_for_and_hardly_ever_the_same() -> None:
    drawn = [jittered(2.0) for _ in range(100)]
    assert all(2.0 <= each <= 2.0 * (1 + SPREAD) for each in drawn)
    assert len(set(drawn)) > 90
    assert jittered(0.0) == 0.0


def test_every_wait_before_another_attempt_is_jittered() -> None:
    plain = {
        str(path.relative_to(PACKAGE)): RETRIES.findall(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }
    assert {path: found for path, found in plain.items() if found and path not in ALONE} == {}
