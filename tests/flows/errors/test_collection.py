"""A collection as the place of a pipeline's dead letters: what fails lies there once, and goes in by a redrive."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import millrace.testing
from millrace.base.errors import InvalidArgument, PipelineInvalid, SinkRefused
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.errors import collection as module
from millrace.flows.errors.collection import ErrorCollection
from millrace.flows.errors.letter import Redriven
from millrace.flows.errors.listing import error_page
from millrace.flows.errors.redrive import redrive
from millrace.flows.errors.selection import EVERYTHING, Selection
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.range_host.observed import described
from millrace.flows.records import TASK_PUT, TRANSFORMATION, Failure, Record
from millrace.pipelines.declaration import as_pipeline, pipeline_of
from millrace.testing import Deployment


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("letters") / "data", pchannels=2) as made:
        yield made


def declared(name: str, *, to: str = "int", **errors: Any) -> dict[str, Any]:
    return {
        "id": name,
        "source": {"kind": "collection", "collection": f"{name}_in"},
        "steps": [{"kind": "cast", "fields": {"n": to}}],
        "sink": {"kind": "collection", "collection": f"{name}_out"},
        "errors": {"collection": f"{name}_letters", **errors},
    }


def made(db: Deployment, name: str, **errors: Any) -> Flow:
    db.create_collection(f"{name}_in", {"id": "string", "n": "string?"}, key="id")
    db.create_collection(f"{name}_out", {"id": "string", "n": "string?"}, key="id")
    return pipeline_of(declared(name, **errors))


def go(settings: Settings, pipeline: Flow) -> None:
    run(FlowRun(settings, pipeline), stop=threading.Event(), until_end=True)


def out(db: Deployment, name: str) -> dict[str, str]:
    return {row["id"]: row["n"] for row in db.collection(f"{name}_out").read().to_pylist()}


def test_what_fails_is_a_letter_once_and_goes_in_when_the_pipeline_is_mended(db: Deployment) -> None:
    pipeline = made(db, "mend")
    db.collection("mend_in").insert([{"id": "a", "n": "x1"}, {"id": "b", "n": "x2"}])
    go(db.settings, pipeline)
    page = error_page(db.settings, pipeline, EVERYTHING)
    assert sorted((each.key, each.stage, each.kind, each.topic, each.partition) for each in page.errors) == [
        ("a", "TRANSFORMATION", "CAST", "mend_in", 0), ("b", "TRANSFORMATION", "CAST", "mend_in", 0)
    ]  # fmt: skip
    assert (page.topic, page.next, page.complete, page.total) == ("mend_letters", None, True, 2)
    assert described(pipeline)["writes"] == ["collection:mend_out", "collection:mend_letters"]
    both = Redriven(looked_at=2, selected=2)
    assert redrive(db.settings, pipeline, dry_run=True) == both
    assert redrive(db.settings, pipeline) == both._replace(failed_again=2), "it is as wrong as before"
    mended = pipeline_of(declared("mend", to="string"))
    none = redrive(db.settings, mended, Selection(kind="OTHER"))
    assert none == Redriven(looked_at=2)
    assert redrive(db.settings, mended) == both._replace(written=2)
    assert out(db, "mend") == {"a": "x1", "b": "x2"}
    assert redrive(db.settings, mended) == Redriven()
    with pytest.raises(InvalidArgument, match="no offsets"):
        redrive(db.settings, mended, Selection(ids=("0-1",)))


def failures(count: int, *, value: bytes = b"{}") -> list[Failure]:
    return [
        Failure(Record("t", 0, n, b"k", value, 7, [("h", b"1"), ("h", None)]), TRANSFORMATION, "0.cast", "CAST", "no")
        for n in range(count)
    ]


def test_a_range_that_is_repeated_replaces_its_letters_and_they_have_the_whole_record(db: Deployment) -> None:
    pipeline = made(db, "again")
    module.ensure_collection(db.settings, pipeline)
    place = ErrorCollection(db.settings, pipeline)
    told = failures(3, value=b"\xff\x00")
    for _ in range(2):
        place.put(told, task="t-0")
    place.close()
    rows = db.collection("again_letters").read(order_by=["batch"]).to_pylist()
    assert [module._record(row) for row in rows] == [each.record for each in told]
    same_place = [told[0]._replace(record=told[0].record._replace(key=b"other"), stage=TASK_PUT)]
    place.put(same_place, task="t-0")
    place.close()
    assert len(db.collection("again_letters").read()) == 4, "rows of one tick share a position, and differ by key"


def test_pages_of_letters_follow_one_another_and_have_each_once(
    db: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = made(db, "pages")
    module.ensure_collection(db.settings, pipeline)
    place = ErrorCollection(db.settings, pipeline)
    place.put(failures(11), task="t-0")
    place.close()
    monkeypatch.setattr(module, "_AT_ONCE", 4)
    found: list[int | None] = []
    before: str | None = ""
    while before is not None:
        page = error_page(db.settings, pipeline, EVERYTHING, before=before, limit=3)
        found += [each.offset for each in page.errors]
        before = page.next
    assert found == list(range(10, -1, -1))
    # Rows of one tick share a position, so a page may end among them.
    same = [each._replace(record=each.record._replace(offset=20, key=b"%d" % n)) for n, each in enumerate(failures(9))]
    place.put(same, task="t-0")
    place.close()
    first = error_page(db.settings, pipeline, EVERYTHING, limit=5)
    second = error_page(db.settings, pipeline, EVERYTHING, before=first.next or "", limit=5)
    keys = [each.key for each in (*first.errors, *second.errors) if each.offset == 20]
    assert sorted(keys) == [str(n) for n in range(9)]
    assert redrive(db.settings, pipeline, dry_run=True).looked_at == 20
    monkeypatch.setattr(module, "MOST_SEEN", 4)
    page = error_page(db.settings, pipeline, Selection(kind="NONE"))
    assert (page.errors, page.complete, page.next is not None) == ([], False, True)
    with pytest.raises(InvalidArgument, match="not a cursor"):
        error_page(db.settings, pipeline, EVERYTHING, before="0-1")


def test_a_redrive_that_is_killed_before_its_letters_go_sends_them_again(
    db: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = made(db, "killed")
    db.collection("killed_in").insert([{"id": "a", "n": "x1"}])
    go(db.settings, pipeline)
    mended = pipeline_of(declared("killed", to="string"))

    def die(name: str) -> None:
        assert name == "redrive.written"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "hit", die)
        with pytest.raises(KeyboardInterrupt):
            redrive(db.settings, mended)
    assert out(db, "killed") == {"a": "x1"}
    assert len(db.collection("killed_letters").read()) == 1
    assert redrive(db.settings, mended) == Redriven(looked_at=1, selected=1, written=1)
    assert (out(db, "killed"), len(db.collection("killed_letters").read())) == ({"a": "x1"}, 0)


def test_a_value_too_large_for_a_message_is_told_of_without_it(db: Deployment) -> None:
    pipeline = made(db, "large")
    module.ensure_collection(db.settings, pipeline)
    place = ErrorCollection(db.settings, pipeline)
    told = failures(1, value=b"x" * (40 << 20)) + failures(2)[1:]
    place.put(told, task="t-0")
    place.close()
    rows = db.collection("large_letters").read(order_by=["batch"]).to_pylist()
    assert [module._record(row) for row in rows] == [None, told[1].record]
    counted = redrive(db.settings, pipeline_of(declared("large", to="string")))
    assert (counted.no_origin, counted.looked_at) == (1, 2)
    assert len(db.collection("large_letters").read()) >= 1


def test_the_place_is_checked(db: Deployment) -> None:
    pipeline = made(db, "checked", create=False)
    with pytest.raises(SinkRefused, match="millrace flows errors create checked_letters"):
        module.ensure_collection(db.settings, pipeline)
    db.create_collection("checked_letters", {"id": "string"}, key="id")
    with pytest.raises(SinkRefused, match="is not a collection of dead letters"):
        module.ensure_collection(db.settings, pipeline)
    for errors, words in (
        ({"collection": "x", "topic": "t"}, "exclude each other"),
        ({"collection": "checked_out"}, "use another one"),
        ({"collection": None}, "errors.collection"),
    ):
        with pytest.raises(PipelineInvalid) as raised:
            pipeline_of(declared("checked") | {"errors": errors})
        assert words in str(raised.value)
    plain = {"kind": "kafka", "bootstrap": ["b:1"], "topics": ["t"]}
    before = pipeline_of({"id": "p", "source": plain, "sink": {"kind": "delta", "table": "p"}})
    assert "collection" not in as_pipeline(before)["errors"], "a declaration of an earlier build has the same JSON"
