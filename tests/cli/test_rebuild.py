"""``millrace rebuild``: the digest of an event store at any tick, and the states of some aggregates."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.client.database import connect
from millrace.commands.parts.command_line import EXIT_VERIFICATION_FAILED
from millrace.streams.sourcing.store import EventStore
from tests.cli.deployment import Deployment
from tests.streams.sourcing.flying import AIRCRAFT, flown

NAME = "tests.streams.sourcing.flying:AIRCRAFT"


def test_aggregates_are_rebuilt_at_a_tick_and_shown(shared: Deployment) -> None:
    with connect(settings=shared.settings) as database:
        store = EventStore.open(database, "rebuilt_planes", AIRCRAFT)
        then = store.append("N1", flown(1), flown(2)).tick
        store.append("N2", flown(3))
        wanted = store.rebuild()
    [now] = shared.as_json("rebuild", "rebuilt_planes", NAME)
    assert (now["aggregates"], now["events"], now["digest"]) == (2, 3, wanted.digest)
    [earlier] = shared.as_json("rebuild", "rebuilt_planes", NAME, "--at", str(then), "--passes", "2")
    assert (earlier["tick"], earlier["aggregates"], earlier["events"]) == (then, 1, 2)
    shared.ok("rebuild", "rebuilt_planes", NAME, "--digest", wanted.digest.upper())
    other = shared.run("rebuild", "rebuilt_planes", NAME, "--digest", earlier["digest"])
    assert other.exit_code == EXIT_VERIFICATION_FAILED
    assert other.stderr.startswith("the digest is")
    [shown] = shared.as_json("rebuild", "rebuilt_planes", NAME, "N1", "--at", str(then))
    assert (shown["aggregate"], shown["version"], shown["state"]["flights"]) == ("N1", 2, 2)
    assert "N9" in shared.ok("rebuild", "rebuilt_planes", NAME, "N9"), "an aggregate without events has version 0"


def test_what_is_no_aggregate_is_refused_in_words(
    shared: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_aggregate.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    for text, words in [
        ("nowhere:ACCOUNTS", "there is no aggregate 'nowhere:ACCOUNTS'"),
        ("tests.streams.sourcing.flying", "name it as module:name"),
        (".flying:AIRCRAFT", "name it as module:name"),
        ("failing_aggregate:ACCOUNTS", "(ZeroDivisionError: division by zero): name it as module:name"),
        ("tests.streams.sourcing.flying:EVENTS", "is of type EventTypes, not a millrace.Aggregate"),
    ]:
        assert words in shared.fails("INVALID_ARGUMENT", "rebuild", "users", text)
    shared.fails("COLLECTION_NOT_FOUND", "rebuild", "no_planes", NAME)
    assert "give no keys" in shared.fails("INVALID_ARGUMENT", "rebuild", "users", NAME, "N1", "--digest", "0")
