"""Rows that only the chain refuses: each is a dead letter once, whatever fails, and the rest of its batch goes in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

import millrace.testing
from millrace.base.errors import AppendRejected, LogUnavailable, MillraceError
from millrace.client.append_client import AppendClient
from millrace.client.database import Database
from millrace.flows.batch import Batch
from millrace.flows.sinks.collection import journal
from millrace.flows.sinks.collection.poison import LETTERS, MOST, redriven
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.flows.sinks.sink import Verdicts
from millrace.testing import Deployment

BAD = 100
"""From this number on a row violates the check that the sink does not know yet."""


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("refused") / "data", append_retry_delay=0.01) as made:
        made.catalog.create_collection("letters", LETTERS, vchannels=2)
        yield made


@contextmanager
def unknown_check(db: Deployment, name: str, *, twice: bool = False) -> Iterator[None]:
    """Make the collection, with a check that sinks do not know meanwhile."""
    fields = {"id": "int64", "n": "int64?"} | ({"twice": "int64?"} if twice else {})
    made = db.create_collection(name, fields, key="id", vchannels=2, computed={"twice": "n * 2"} if twice else None)
    older, known = db.definition(name), Database.definition
    made.alter(add_check={"small": f"n < {BAD}"})

    def definition(self: Database, asked: str, **options: Any) -> Any:
        return older if asked == name else known(self, asked, **options)

    with patch.object(Database, "definition", definition):
        yield


def rows(*found: tuple[Any, ...], names: tuple[str, ...] = ("id", "n")) -> list[pa.RecordBatch]:
    return pa.table({name: [row[place] for row in found] for place, name in enumerate(names)}).to_batches()


def sink(db: Deployment, folder: Path, name: str, **options: Any) -> CollectionSink:
    return CollectionSink(db.settings, name, memory=folder / "sink", dead_letters="letters", stream=name, **options)


def contents(db: Deployment, name: str) -> Counter[tuple[Any, ...]]:
    db.settle()
    return Counter(tuple(row.values()) for row in db.collection(name).read(columns=["id", "n"]).to_pylist())


def letters(db: Deployment, name: str) -> pa.Table:
    db.settle()
    return db.collection("letters").read(where=f"stream = '{name}'", order_by="id")


def refused(found: pa.Table) -> Counter[tuple[Any, ...]]:
    batches = redriven(found)
    return Counter((row["id"], row["n"]) for each in batches for row in each.to_pylist())


def test_refused_rows_are_letters_and_come_back_from_them(db: Deployment, tmp_path: Path) -> None:
    with unknown_check(db, "checked", twice=True):
        for _ in range(2):
            with sink(db, tmp_path, "checked") as to:
                assert to.write(Batch.of_rows("query", 0, rows(*((n, n) for n in range(90, 103))))) in (
                    Verdicts(10, 3),
                    Verdicts(10, 3, again=True),
                )
        found = letters(db, "checked")
        assert found["id"].to_pylist() == [f"checked/0/{place}" for place in (10, 11, 12)]
        assert all("small" in each for each in found["reason"].to_pylist())
        assert contents(db, "checked") == Counter((n, n) for n in range(90, 100))
    db.collection("checked").alter(drop_check=["small"])
    with sink(db, tmp_path / "again", "checked") as to:
        assert to.redrive(found) == 3
    assert contents(db, "checked") == Counter((n, n) for n in range(90, 103))
    assert len(letters(db, "checked")) == 0


def test_of_a_key_the_last_change_that_the_chain_takes_counts(db: Deployment, tmp_path: Path) -> None:
    names = ("id", "n", "_change", "_time_tick", "_write_tick")
    changes = [
        (1, 1, "upsert", 2, 2), (1, None, "delete", 3, 3), (1, 100, "upsert", 4, 4),
        (2, 102, "upsert", 7, 7), (2, 22, "upsert", 5, 5), (2, 101, "upsert", 6, 6),
        (3, None, "delete", 8, 8), (3, 3, "upsert", 9, 9), (3, 103, "upsert", 10, 10),
        (4, 104, "upsert", 11, 11),
    ]  # fmt: skip
    with unknown_check(db, "mirror"), sink(db, tmp_path, "mirror", mode="changes") as to:
        old = [(1, 7, "upsert", 1, 1), (4, 8, "upsert", 1, 1)]
        to.write(Batch.of_rows("query", 0, rows(*old, names=names)))
        assert to.write(Batch.of_rows("query", 1, rows(*changes, names=names))) == Verdicts(5, 5)
        assert contents(db, "mirror") == Counter([(2, 22), (3, 3), (4, 8)])
        found = letters(db, "mirror")
        assert refused(found) == Counter([(1, 100), (2, 101), (2, 102), (3, 103), (4, 104)])
    db.collection("mirror").alter(drop_check=["small"])
    with sink(db, tmp_path / "again", "mirror", mode="changes") as to:
        assert to.redrive(found) == 5
    assert contents(db, "mirror") == Counter([(1, 100), (2, 102), (3, 103), (4, 104)])


@pytest.mark.parametrize("guarantee", ["at least once", "at most once"])
def test_other_guarantees_put_refused_rows_aside_too(db: Deployment, tmp_path: Path, guarantee: Any) -> None:
    name = guarantee.replace(" ", "_")
    with unknown_check(db, name), sink(db, tmp_path, name, mode="upsert", guarantee=guarantee) as to:
        found = to.write(Batch.of_rows("query", 0, rows((1, 1), (2, 200), (1, 100), (3, 3))))
    assert found == Verdicts(2, 2)
    assert contents(db, name) == Counter([(1, 1), (3, 3)])
    assert refused(letters(db, name)) == Counter([(1, 100), (2, 200)])


@pytest.mark.parametrize("guarantee", ["at least once", "at most once"])
def test_a_refused_row_repeats_no_other_row(db: Deployment, tmp_path: Path, guarantee: Any) -> None:
    name = f"appended_{guarantee.replace(' ', '_')}"
    with unknown_check(db, name), sink(db, tmp_path, name, guarantee=guarantee) as to:
        given = [(n, BAD if n == 3 else n) for n in range(20)]
        assert to.write(Batch.of_rows("query", 0, rows(*given))) == Verdicts(19, 1)
    assert contents(db, name) == Counter(each for each in given if each[1] < BAD)


def test_a_row_that_is_too_large_is_a_letter_without_its_payload(db: Deployment, tmp_path: Path) -> None:
    made = db.create_collection("large", {"id": "int64", "text": "string"}, key="id")
    for pchannel in {*made.definition.pchannels, *db.definition("letters").pchannels}:
        db.catalog.open_term(pchannel, config={"max_message_bytes": 20_000})
    with sink(db, tmp_path, "large") as to:
        given = rows((1, "a"), (2, "b" * 50_000), (3, "c"), names=("id", "text"))
        assert to.write(Batch.of_rows("query", 0, given)) == Verdicts(2, 1)
    found = letters(db, "large")
    assert [(len(row["row"]), row["payload"]) for row in found.to_pylist()] == [(4_096, b"")]
    with sink(db, tmp_path / "again", "large") as to:
        assert to.redrive(found) == 0, "nothing of it is left to be sent"
    assert contents_of(db, "large") == [1, 3]


def contents_of(db: Deployment, name: str) -> list[int]:
    db.settle()
    return sorted(db.collection(name).read(columns="id")["id"].to_pylist())


def test_more_refused_rows_than_letters_stop_the_stream(db: Deployment, tmp_path: Path) -> None:
    with unknown_check(db, "flood"), sink(db, tmp_path, "flood") as to:
        given = rows(*((n, n if n < 10 else BAD) for n in range(MOST + 11)))
        for _ in range(2):
            with pytest.raises(AppendRejected, match="small"):
                to.write(Batch.of_rows("query", 0, given))
    db.collection("flood").alter(drop_check=["small"])
    with sink(db, tmp_path, "flood") as to:
        assert to.write(Batch.of_rows("query", 0, given)).again
    found = letters(db, "flood")
    assert len(found) <= MOST
    assert sum((contents(db, "flood") + refused(found)).values()) == MOST + 11, "each row is in one of the two"


class Killed(BaseException):
    """Nothing of the process runs after this."""


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(1, 20))])
def test_each_row_is_taken_or_a_letter_once_whatever_is_killed(
    db: Deployment, tmp_path: Path, mode: Any, seed: int
) -> None:
    """A batch is killed after any step of its journal, or loses its answers, and comes again."""
    dice, name, told = random.Random(f"{mode}{seed}"), f"{mode}_{seed}", AppendClient.append
    given = [
        [
            (dice.randrange(12) if mode == "upsert" else 100 * batch + each, dice.randrange(BAD + 25))
            for each in range(20)
        ]
        for batch in range(4)
    ]
    steps = iter(range(1 << 30))
    kills = {dice.randrange(1, 22) for _ in range(6)}

    def step(point: str) -> None:
        if next(steps) in kills:
            raise Killed(point)

    def append(self: AppendClient, *args: Any, **options: Any) -> Any:
        lost = dice.random()
        if lost < 0.1:
            raise LogUnavailable("it did not arrive")
        found = told(self, *args, **options)
        if lost > 0.9:
            raise LogUnavailable("the answer was lost")
        return found

    failed = Counter[str]()
    with unknown_check(db, name), patch.object(journal, "hit", step), patch.object(AppendClient, "append", append):
        batch = 0
        while batch < len(given):
            try:
                with sink(db, tmp_path, name, mode=mode) as to:
                    while batch < len(given):
                        to.write(Batch.of_rows("query", batch, rows(*given[batch])))
                        batch += 1
            except (Killed, MillraceError) as error:
                failed[type(error).__name__] += 1
                assert failed.total() < 100, failed
    assert failed, "something was killed"
    wanted, aside = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    state: dict[int, int] = {}
    for each in given:
        for place, (key, n) in enumerate(each):
            good_later = mode == "upsert" and any(k == key and m < BAD for k, m in each[place + 1 :])
            if n >= BAD and not good_later:
                aside[key, n] += 1
            elif n < BAD:
                state[key] = n
    wanted.update(state.items())
    assert contents(db, name) == wanted
    assert refused(letters(db, name)) == aside
