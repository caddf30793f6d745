"""Each record gets one outcome: what the steps say, or the step and the reason.

What one document does is no other's matter.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import LogUnavailable
from millrace.flows.declare.steps import Lookup
from millrace.flows.records import Record
from millrace.flows.transform.operators import Rows, names_read
from millrace.flows.transform.transform import Transform
from millrace.pipelines.declaration import pipeline_of

SOURCE = {"kind": "kafka", "bootstrap": ["127.0.0.1:9092"], "topics": ["flights"]}
SINK = {"kind": "opensearch", "hosts": ["http://127.0.0.1:9200"], "index_base": "flights"}


class Airlines:
    def get(self, key: str, /) -> Mapping[str, Any] | None:
        return {"carrier": key, "name": "United", "size": 3} if key == "UA" else None


def _rows(step: Lookup) -> Rows:
    assert step.collection == "airlines"
    return Airlines()


def _made(*steps: dict[str, Any], **sink: Any) -> Transform:
    return Transform(
        pipeline_of({"id": "x", "source": SOURCE, "steps": steps, "sink": {**SINK, **sink}}), open_rows=_rows
    )


def _record(value: Any, *, key: bytes | None = b"k", offset: int = 7) -> Record:
    given = value if isinstance(value, bytes) or value is None else json.dumps(value).encode()
    return Record("flights", 3, offset, key, given, 1_700_000_000_000)


def _one(document: Any, *steps: dict[str, Any], **sink: Any) -> Any:
    """The document that comes out; or (step, kind, reason) of the failure; or "filtered"."""
    done = _made(*steps, **sink).run([_record(document)])
    assert len(done.actions) + len(done.failures) + done.filtered == 1
    if done.failures:
        return done.failures[0][2:]
    return json.loads(done.actions[0].body or b"null") if done.actions else "filtered"


@pytest.mark.parametrize(
    ("step", "before", "after"),
    [
        ({"kind": "rename", "fields": {"a": "b"}}, {"a": 1, "b": 2}, {"b": 1}),
        ({"kind": "rename", "fields": {"a": "b", "b": "a"}}, {"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ({"kind": "rename", "fields": {"a.x": "c.d.e", "no": "never"}}, {"a": {"x": 1, "y": 2}},
            {"a": {"y": 2}, "c": {"d": {"e": 1}}}),
        ({"kind": "rename", "fields": {"a\\.b": "c"}}, {"a.b": 1, "a": {"b": 2}}, {"a": {"b": 2}, "c": 1}),
        ({"kind": "cast", "fields": {"a": "int", "b": "float", "c": "string", "d": "bool"}},
         {"a": " 12 ", "b": "1.5e3", "c": 7, "d": "TRUE"}, {"a": 12, "b": 1500.0, "c": "7", "d": True}),
        ({"kind": "cast", "fields": {"a": "int", "b": "int", "c": "int"}}, {"a": 2.0, "b": None}, {"a": 2, "b": None}),
        ({"kind": "cast", "fields": {"a": "timestamp", "b": "timestamp", "c": "timestamp", "d": "timestamp"}},
         {"a": "2013-01-01T05:00:00+02:00", "b": 1357016400, "c": 1357016400500, "d": "2013-01-01"},
         {"a": "2013-01-01T03:00:00Z", "b": "2013-01-01T05:00:00Z", "c": "2013-01-01T05:00:00.500000Z",
             "d": "2013-01-01T00:00:00Z"}),
        ({"kind": "drop", "fields": ["a", "b.c", "no.such"]}, {"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"d": 2}}),
        ({"kind": "constant", "fields": {"a": [1], "b.c": None}}, {}, {"a": [1], "b": {"c": None}}),
        ({"kind": "lookup", "collection": "airlines", "key": "c", "into": "airline", "take": ["name"]}, {"c": "UA"},
         {"c": "UA", "airline": {"name": "United"}}),
        ({"kind": "lookup", "collection": "airlines", "key": "c", "into": "airline", "missing": "null"}, {"c": "XX"},
         {"c": "XX", "airline": None}),
        ({"kind": "lookup", "collection": "airlines", "key": "c", "into": "airline", "missing": "skip"}, {}, {}),
        ({"kind": "flatten"}, {"a": {"b": {"c": 1}, "d": [1, {"e": 2}]}, "f": {}},
            {"a.b.c": 1, "a.d": [1, {"e": 2}], "f": {}}),
        ({"kind": "flatten", "separator": "_", "lists": "index", "depth": 1}, {"a": {"b": {"c": 1}}, "d": [5]},
            {"a_b": {"c": 1}, "d_0": 5}),
        ({"kind": "filter", "keep": "doc.a > 1 && record.partition == 3"}, {"a": 2}, {"a": 2}),
        ({"kind": "filter", "keep": "has(doc.a)"}, {"b": 2}, "filtered"),
        ({"kind": "compute", "fields": {"a": "doc.a + 1", "b": "doc.a"}}, {"a": 1}, {"a": 2, "b": 1}),
        ({"kind": "compute", "fields": {"n": "size(doc)", "t": "timestamp('2013-01-01T00:00:00Z')"}}, {"a": 1},
         {"a": 1, "n": 1, "t": "2013-01-01T00:00:00Z"}),
        ({"kind": "json_schema", "schema": {"required": ["a"]}}, {"a": 1}, {"a": 1}),
    ],
)  # fmt: skip
def test_a_step_does_what_its_words_say(step: dict[str, Any], before: Any, after: Any) -> None:
    assert _one(before, step) == after


@pytest.mark.parametrize(
    ("step", "document", "kind"),
    [
        ({"kind": "cast", "fields": {"a": "int"}}, {"a": "12a"}, "CAST"),
        ({"kind": "cast", "fields": {"a": "int"}}, {"a": 2.5}, "CAST"),
        ({"kind": "cast", "fields": {"a": "float"}}, {"a": "NaN"}, "CAST"),
        ({"kind": "cast", "fields": {"a": "float"}}, {"a": 10**400}, "CAST"),
        ({"kind": "cast", "fields": {"a": "bool"}}, {"a": 2}, "CAST"),
        ({"kind": "cast", "fields": {"a": "string"}}, {"a": {}}, "CAST"),
        ({"kind": "cast", "fields": {"a": "timestamp"}}, {"a": 10**30}, "CAST"),
        ({"kind": "rename", "fields": {"a": "b.c"}}, {"a": 1, "b": 2}, "NO_OBJECT"),
        ({"kind": "template_id", "template": "{a}"}, {}, "NO_ID"),
        ({"kind": "template_id", "template": "{a}"}, {"a": None}, "NO_ID"),
        ({"kind": "lookup", "collection": "airlines", "key": "c", "into": "x"}, {"c": "XX"}, "NO_ROW"),
        ({"kind": "flatten"}, {"a.b": 1, "a": {"b": 2}}, "TWO_VALUES"),
        ({"kind": "filter", "keep": "doc.a"}, {"a": 1}, "NO_BOOL"),
        ({"kind": "filter", "keep": "doc.a > 1"}, {}, "EXPRESSION"),
        ({"kind": "filter", "keep": "doc.a > 1"}, {"a": "x"}, "EXPRESSION"),
        ({"kind": "compute", "fields": {"a": "1 / doc.a"}}, {"a": 0}, "EXPRESSION"),
        ({"kind": "compute", "fields": {"a": "doc.a / 0.0"}}, {"a": 1.0}, "NO_JSON"),
        ({"kind": "compute", "fields": {"a": "doc.a + 1"}}, {"a": 2**63 - 1}, "EXPRESSION"),
        ({"kind": "json_schema", "schema": {"required": ["a"]}}, {}, "SCHEMA"),
        ({"kind": "json_schema", "schema": {"properties": {"a": {"type": "string"}}}}, {"a": 1}, "SCHEMA"),
    ],
)  # fmt: skip
def test_what_a_step_cannot_do_says_step_and_reason(step: dict[str, Any], document: Any, kind: str) -> None:
    found = _one(document, {**step, "name": "mine"})
    assert found[:2] == ("mine", kind)
    assert found[2]


POISON: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{'a': 1}",
    "cut off": b'{"a": [1, 2',
    "no UTF-8": b'{"a": "\xff\xfe"}',
    "no object": b"[1, 2]",
    "null": b"null",
    "NaN": b'{"a": NaN}',
    "a lone surrogate": b'{"a": "\\ud800"}',
    "too deep": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "two documents": b'{"a": 1}{"a": 2}',
    "bytes of another format": b"\x00\x00\x00\x00\x01\x0aObj\x01",
    "a number without end": b'{"a": 1' + b"0" * 5000 + b"}",
}


@pytest.mark.parametrize("name", POISON)
def test_poison_is_one_record_s_failure(name: str) -> None:
    steps = [{"kind": "cast", "fields": {"a": "int"}}, {"kind": "filter", "keep": "doc.a >= 0"}]
    good = [_record({"a": place}, offset=place) for place in range(3)]
    done = _made(*steps).run([good[0], _record(POISON[name], offset=100), good[1], good[2]])
    assert [action.record.offset for action in done.actions] == [0, 1, 2]
    assert [failure.record.offset for failure in done.failures] == [100]
    assert done.failures[0].reason
    assert len(done.failures[0].reason) < 1000


def test_ids_are_positions_keys_or_templates_and_never_none() -> None:
    by_key = {"ids": "key"}
    done = _made().run([_record({"a": 1}, key=None)])
    assert (done.actions[0].id, done.actions[0].version) == ("flights-3-7", None)
    done = _made(**by_key).run(
        [_record({"a": 1}, key=b"UA-1"), _record({}, key=None), _record({}, key=b""), _record({}, key=b"\xff")]
    )
    assert [(each.id, each.version) for each in done.actions] == [("UA-1", 7)]
    assert [each.kind for each in done.failures] == ["NO_KEY"] * 3
    done = _made({"kind": "template_id", "template": "{a}/{b.c}", "into": "id"}, ids="template").run(
        [_record({"a": 1, "b": {"c": "x"}})]
    )
    assert (done.actions[0].id, json.loads(done.actions[0].body or b"")["id"]) == ("1/x", "1/x")


def test_a_tombstone_deletes_by_key_alone() -> None:
    done = _made(ids="key").run([_record(None, key=b"UA")])
    assert done.actions == [(done.actions[0].record, "UA", None, 7)]
    assert _made(ids="key", tombstones="ignore").run([_record(None)]).filtered == 1
    assert _made(ids="key", tombstones="error").run([_record(None)]).failures[0].kind == "TOMBSTONE"
    assert _made().run([_record(None)]).failures[0].kind == "TOMBSTONE"


def test_a_dry_run_shows_the_document_behind_each_step() -> None:
    made = _made(
        {"kind": "rename", "fields": {"a": "b"}, "name": "first"},
        {"kind": "filter", "keep": "doc.b > 0"},
        {"kind": "cast", "fields": {"b": "string"}},
    )
    shown = made.show(_record({"a": 1}))
    assert [(each.step, each.document) for each in shown.steps] == [
        ("first", {"b": 1}),
        ("1.filter", {"b": 1}),
        ("2.cast", {"b": "1"}),
    ]
    assert (shown.outcome, shown.id, shown.document) == ("index", "flights-3-7", {"b": "1"})
    assert made.show(_record({"a": 0})).outcome == "filtered"
    failed = made.show(_record({"a": "x"}))
    assert (failed.outcome, failed.steps[-1].step) == ("error", "1.filter")
    assert made.show(_record(b"{")).outcome == "error"


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("doc.a + doc.b.c", {"a", "b"}),
        ("doc[\"a b\"] == doc['c']", {"a b", "c"}),
        ("has(doc.a)", {"a"}),
        ("doc.size() > 1", None),
        ("size(doc)", None),
        ("doc[record.key]", None),
        ("'a' in doc", None),
        ("doc.map(k, k) == [doc.a]", None),
        ("record.offset > 1", set()),
    ],
)
def test_what_an_expression_reads_of_a_document(expression: str, names: set[str] | None) -> None:
    assert names_read(expression) == names


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["a", "b", "c", "a.b", ""]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
_DOCUMENT = st.dictionaries(st.sampled_from(["a", "b", "c", "a.b"]), _JSON, max_size=4)
_PATH = st.sampled_from(["a", "b", "c", "a.b", "b.c.a", "a\\.b"])
_STEP = st.one_of(
    st.builds(lambda old, new: {"kind": "rename", "fields": {old: new}}, _PATH, _PATH),
    st.builds(
        lambda path, to: {"kind": "cast", "fields": {path: to}},
        _PATH,
        st.sampled_from(["string", "int", "float", "bool", "timestamp"]),
    ),
    st.builds(lambda path: {"kind": "drop", "fields": [path]}, _PATH),
    st.builds(lambda path, value: {"kind": "constant", "fields": {path: value}}, _PATH, _JSON),
    st.builds(
        lambda lists, depth: {"kind": "flatten", "lists": lists, "depth": depth},
        st.sampled_from(["keep", "index"]),
        st.integers(1, 3),
    ),
    st.builds(
        lambda keep: {"kind": "filter", "keep": keep},
        st.sampled_from(["has(doc.a)", "doc.a == doc.b", "size(doc) > 1", "doc.a > 1"]),
    ),
)


@settings(max_examples=150)
@given(st.lists(_STEP, max_size=5), st.lists(_DOCUMENT | st.binary(max_size=8), max_size=6))
def test_every_record_has_one_outcome_and_the_same_alone_as_among_others(steps: list[Any], values: list[Any]) -> None:
    made = _made(*steps)
    records = [_record(value, offset=place) for place, value in enumerate(values)]
    done = made.run(records)
    assert len(records) == len(done.actions) + len(done.failures) + done.filtered
    alone = [made.run([record]) for record in records]
    assert done.actions == [action for each in alone for action in each.actions]
    assert done.failures == [failure for each in alone for failure in each.failures]
    shown = [made.show(record) for record in records]
    assert [each.outcome for each in shown if each.outcome != "filtered"] == [
        "index" if each.actions else "error" for each in alone if not each.filtered
    ]
    for action in done.actions:
        assert action.body is not None
        assert b"\n" not in action.body
        json.loads(action.body)


@given(_DOCUMENT)
def test_without_steps_a_document_is_what_it_was(document: dict[str, Any]) -> None:
    before = copy.deepcopy(document)
    body = _made().run([_record(msgspec.json.encode(document))]).actions[0].body
    assert body is not None
    assert json.loads(body) == before


@given(_DOCUMENT, st.sampled_from(["keep", "index"]))
def test_flattening_keeps_every_value(document: dict[str, Any], lists: str) -> None:
    def leaves(value: Any) -> list[Any]:
        inner = (
            list(value.values())
            if isinstance(value, dict)
            else value
            if isinstance(value, list) and lists == "index"
            else None
        )
        return [leaf for each in inner for leaf in leaves(each)] if inner else [value]

    found = _one(document, {"kind": "flatten", "lists": lists, "depth": 64})
    if isinstance(found, dict):
        assert list(map(repr, leaves(document) if document else [])) == list(map(repr, found.values()))
    else:
        assert found[1] == "TWO_VALUES"


def test_numbers_stay_the_numbers_that_they_were() -> None:
    found = _one(b'{"a": 12345678901234567890123, "b": 0.1, "c": -0.0, "d": 1e300}')
    assert found["b"] == 0.1
    assert found["d"] == 1e300
    assert math.copysign(1, found["c"]) == -1


@pytest.mark.parametrize(
    ("document", "step", "kind"),
    [
        ({"a": list(range(20_000))}, {"kind": "filter", "keep": "doc.a.exists(x, doc.a.exists(y, x + y == -1))"},
            "TOO_MUCH_WORK"),
        ({"a": list(range(20_000))}, {"kind": "compute", "fields": {"b": "doc.a.map(x, doc.a)"}}, "TOO_MUCH_WORK"),
        ({"a": list(range(300_000))}, {"kind": "filter", "keep": "(doc.a + doc.a + doc.a + doc.a + doc.a).all(x, x >="
            " 0)"}, "TOO_MUCH_WORK"),
        ({"a": "x" * 500_000}, {"kind": "compute", "fields": {"b": "+".join(["doc.a"] * 200)}}, "TOO_MUCH_WORK"),
        ({"n" * 100_000: {str(n): n for n in range(5000)}}, {"kind": "flatten"}, "TOO_LARGE"),
        ({"a": "x" * 30_000}, {"kind": "template_id", "template": "{a}{a}{a}"}, "ID_LENGTH"),
    ],
    ids=["loops in loops", "lists of lists", "added lists", "added texts", "a long name above many", "a long id"],
)  # fmt: skip
def test_a_document_cannot_make_a_step_work_without_end(document: Any, step: dict[str, Any], kind: str) -> None:
    begun = time.monotonic()
    assert _one(document, step)[1] == kind
    assert time.monotonic() - begun < 5, "it was refused, not tried"


@pytest.mark.slow
def test_documents_of_a_reasonable_size_are_worked_on() -> None:
    loops = {"kind": "compute", "fields": {"n": "doc.a.map(x, doc.b.filter(y, y == x).size()).size()"}}
    assert _one({"a": list(range(500)), "b": list(range(500))}, loops)["n"] == 500
    assert len(_one({"a": "x" * 10_000}, {"kind": "compute", "fields": {"b": "doc.a + doc.a + doc.a"}})["b"]) == 30_000
    long = {"kind": "filter", "keep": "doc.a.exists(x, x == 999999)"}
    assert _one({"a": list(range(1_000_000))}, long) != "filtered"


def test_a_collection_that_cannot_be_read_is_no_document_s_fault() -> None:
    class Away:
        def get(self, key: str, /) -> Mapping[str, Any] | None:
            raise LogUnavailable("no answer")

    step = {"kind": "lookup", "collection": "airlines", "key": "carrier", "into": "airline"}
    made = Transform(
        pipeline_of({"id": "x", "source": SOURCE, "steps": [step], "sink": SINK}), open_rows=lambda _: Away()
    )
    with pytest.raises(LogUnavailable):
        made.run([_record({"carrier": "UA"})])
    assert made.show(_record({"carrier": "UA"})).outcome == "error"


@pytest.mark.parametrize(
    ("value", "version"),
    [
        (0, 0),
        (1 << 62, 1 << 62),
        ("1970-01-01T00:00:01Z", 1_000_000),
        ("2026-11-26T10:00:00.000001+02:00", 1_795_680_000_000_001),
        (-1, None),
        (1 << 63, None),
        (1.0, None),
        (True, None),
        ("1970-01-01T00:00:01", None),
        ("12", None),
        (None, None),
    ],
)
def test_a_version_is_what_the_named_field_says_or_a_reason(value: Any, version: int | None) -> None:
    made = _made(ids="key", version_field="at.moment", tombstones="error")
    done = made.run([_record({"at": {"moment": value}}), _record({"other": 1})])
    if version is None:
        assert [(each.step, each.kind) for each in done.failures] == [("version", "NO_VERSION")] * 2
    else:
        assert [each.version for each in done.actions] == [version]
        assert [each.kind for each in done.failures] == ["NO_VERSION"]
    assert made.show(_record({"at": {"moment": value}})).version == version


def test_numbers_keep_all_their_digits_through_steps_that_do_not_touch_them() -> None:
    text = (
        b'{"a":0.12345678901234567890,"b":{"c":[3.14159265358979323846,9007199254740993.0]},"d":123456789012345678901}'
    )
    steps: list[dict[str, Any]] = [
        {"kind": "json_schema", "schema": {"properties": {"a": {"type": "number", "maximum": 1}}}},
        {"kind": "compute", "fields": {"e": "doc.a < 1.0"}},
    ]
    done = _made(*steps).run([_record(text)])
    assert [each.body for each in done.actions] == [text[:-1] + b',"e":true}']
    assert _one({"a": 1}, {"kind": "cast", "fields": {"a": "string"}}) == {"a": "1"}
    assert (
        json.loads(_made({"kind": "cast", "fields": {"a": "string"}}).run([_record(text)]).actions[0].body or b"")["a"]
        == "0.12345678901234567890"
    )
    for kind in ("float", "timestamp"):
        assert not _made({"kind": "cast", "fields": {"a": kind}}).run([_record(text)]).failures
