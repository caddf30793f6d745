"""The flights of 2013 as events of their aircraft, by eight writers at once; rebuilt at any tick with an equal digest.

The oracle is DuckDB over the changes of the collection and the table of flights: it knows neither folds nor versions.
Each writer has aircraft of its own, and each aircraft has flights of any writer among them (CONTESTED). So writers lose
commands to each other; each loser reads what is new and goes on.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pytest

import millrace.testing
from millrace.base.errors import VersionConflict
from millrace.client.database import Database
from millrace.demo.flights import flights
from millrace.streams.sourcing.groups import Command
from millrace.streams.sourcing.store import EventStore, Loaded
from tests.streams.sourcing.flying import AIRCRAFT, Aircraft, Flown

WRITERS = 8
CONTESTED = 50
"""One of so many flights is not written by the writer of its aircraft."""


def write(database: Database, name: str, rows: Sequence[dict[str, Any]], batch: int) -> tuple[int, int]:
    """Append the flights of one writer with expected versions; return its last tick and the conflicts that it lost."""
    store = EventStore(database, database.collection(name), AIRCRAFT)
    waiting = [
        (row["tailnum"] or "?", Flown(row["id"], row["distance"], row["dep_delay"], row["dest"])) for row in rows
    ]
    versions: dict[str, int] = {}
    tick = conflicts = 0
    while waiting:
        part, waiting = waiting[:batch], waiting[batch:]
        for key in [key for key, _ in part if key not in versions]:
            versions[key] = 0
        commands, expected = [], dict(versions)
        for key, event in part:
            commands.append(Command(key, [event], expected[key]))
            expected[key] += 1
        again = []
        for (key, event), found in zip(part, store.append_all(commands), strict=True):
            if isinstance(found, VersionConflict):
                versions[key] = found.current_version
                conflicts += 1
                again.append((key, event))
            elif isinstance(found, Exception):
                raise found
            else:
                versions[key], tick = found.version, max(tick, found.tick)
        waiting = again + waiting
    return tick, conflicts


def states_by_duckdb(changes: Any, tick: int) -> list[Loaded[Aircraft]]:
    """The states at a tick, by SQL over the rows of all changes, in the order of their ticks."""
    with duckdb.connect() as engine:
        engine.register("changes", changes)
        found = engine.execute(
            """
            with event as (
                select aggregate, version, json_extract(data, '$.distance')::bigint as distance,
                    try_cast(json_extract_string(data, '$.delay') as bigint) as delay,
                    json_extract_string(data, '$.dest') as dest
                from changes where _change = 'insert' and _time_tick <= ?)
            select aggregate, count(*), sum(distance), count(*) filter (delay > 15), arg_max(dest, version)
            from event group by aggregate
            """,
            [tick],
        ).fetchall()
    return [
        Loaded(key, Aircraft("", count, int(miles), late, dest), count, tick) for key, count, miles, late, dest in found
    ]


def check(database: Database, name: str, rows: Sequence[dict[str, Any]], *, batch: int, ticks: int) -> None:
    shares: list[list[dict[str, Any]]] = [[] for _ in range(WRITERS)]
    for number, row in enumerate(rows):
        own = zlib.crc32((row["tailnum"] or "?").encode())
        shares[(number // CONTESTED if number % CONTESTED == 0 else own) % WRITERS].append(row)
    with ThreadPoolExecutor(WRITERS) as pool:
        found = list(pool.map(lambda share: write(database, name, share, batch), shares))
    assert sum(conflicts for _, conflicts in found) >= len(rows) // CONTESTED // 5
    store = EventStore(database, database.collection(name), AIRCRAFT)
    changes = store.collection.changes_between().read_all()
    assert changes.num_rows == len(rows)
    end = store.rebuild()
    assert (end.events, end.aggregates) == (len(rows), len({row["tailnum"] for row in rows}))
    seen = sorted(set(changes["_time_tick"].to_pylist()))
    chosen = [*random.Random(7).sample(seen, ticks), seen[0], seen[-1]]
    for tick in chosen:
        wanted = store.digest(states_by_duckdb(changes, tick))
        assert store.rebuild(at=tick).digest == wanted
        assert store.rebuild(at=tick, passes=3).digest == wanted
    assert store.digest(states_by_duckdb(changes, seen[-1])) == end.digest


def test_a_sample_of_the_flights_by_eight_writers(deployment: millrace.testing.Deployment) -> None:
    EventStore.open(deployment, "sample", AIRCRAFT, vchannels=4)
    rows = flights().slice(0, 1_000).select(["id", "tailnum", "distance", "dep_delay", "dest"]).to_pylist()
    check(deployment, "sample", rows, batch=50, ticks=3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_flights_by_eight_writers(tmp_path: Path) -> None:
    with millrace.testing.deployment(tmp_path / "data") as database:
        database.catalog.ensure_pchannels(4)
        EventStore.open(database, "aircraft", AIRCRAFT, vchannels=8)
        rows = flights().select(["id", "tailnum", "distance", "dep_delay", "dest"]).to_pylist()
        assert len(rows) == 336_776
        check(database, "aircraft", rows, batch=500, ticks=6)
