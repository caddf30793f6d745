"""Documents that nobody can index, of many kinds, between those that one can.

Each poisons itself alone, and is in the error topic by its true place.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.cimpl import NewTopic

from millrace.flows.errors.redrive import redrive
from millrace.flows.errors.selection import PREFIX
from millrace.flows.errors.topic import OMITTED
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.range_host.positions import positions_of
from tests.flows.range_host.flights import Flights

MAPPING = {
    "settings": {"index.mapping.total_fields.limit": 50},
    "mappings": {"properties": {"n": {"type": "long"}, "when": {"type": "date"}, "word": {"type": "keyword"}}},
}


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


POISON: dict[str, tuple[bytes | None, bytes]] = {
    "cut off": (b"p", b'{"n": 1'),
    "nothing at all": (b"p", b""),
    "a list": (b"p", b"[1, 2]"),
    "no UTF-8": (b"p", b'{"n": 1, "a": "\xff"}'),
    "half a surrogate": (b"p", b'{"n": 1, "a": "\\ud800"}'),
    "no number": (b"p", b'{"n": NaN}'),
    "two thousand levels": (b"p", b'{"a":' * 2000 + b"1" + b"}" * 2000),
    "sixty levels": (b"p", b'{"a":' * 60 + b"1" + b"}" * 60),
    "another type": (b"p", _text({"n": "many"})),
    "an object for a number": (b"p", _text({"n": {"a": 1}})),
    "a number beyond any": (b"p", b'{"n": ' + b"9" * 400 + b"}"),
    "no date": (b"p", _text({"when": "yesterday"})),
    "an immense word": (b"p", _text({"word": "w" * 40_000})),
    "too many names": (b"p", _text({f"f{n}": n for n in range(100)})),
    "a name of nothing": (b"p", _text({"": 1})),
    "no key": (None, _text({"n": 1})),
    "a key that is no text": (b"\xff\xfe", _text({"n": 1})),
    "a key that is too long": (b"k" * 600, _text({"n": 1})),
    "large": (b"p", _text({"n": "many", "a": "x" * 1_000_000})),
}
FORGED = [(f"{PREFIX}{name}", value) for name, value in (("topic", b"other"), ("partition", b"7"), ("offset", b"1"))]


def test_each_poisons_itself_alone(tmp_path: Path) -> None:
    flights = Flights(
        tmp_path, partitions=1, steps=[{"kind": "constant", "fields": {"by": "us"}}], sink={"index_body": MAPPING}
    )
    # Made by somebody, with the brokers' own limit, which a large record with our headers goes beyond.
    errors = flights.pipeline.errors_topic
    made = NewTopic(errors, 1, 1, config={"max.message.bytes": "1000100"})
    flights.admin.create_topics([made])[errors].result(30)
    expected: dict[str, int] = {}
    bad: dict[int, str] = {}

    def told(what: str, error: Any, message: Any) -> None:
        assert error is None, (what, error)
        bad[message.offset()] = what

    producer = Producer({"bootstrap.servers": flights.kafka.address, "message.max.bytes": 4_000_000})
    for number, (what, (key, value)) in enumerate(POISON.items()):
        flights.send([(f"good{number}", {"n": number})])
        expected[f"good{number}"] = number
        producer.produce(
            flights.id,
            value,
            key,
            headers=FORGED,
            on_delivery=lambda error, message, what=what: told(what, error, message),
        )
        assert producer.flush(30) == 0
    run(FlowRun(flights.settings, flights.pipeline), stop=threading.Event(), until_end=True)
    assert {key: document["n"] for key, document in flights.index().items()} == expected
    found: dict[str, Any] = {}
    for message in flights.errors():
        headers = dict(message.headers())  # the last of each name
        assert headers[f"{PREFIX}topic"] == flights.id.encode(), "not what the record says of itself"
        found[bad[int(headers[f"{PREFIX}offset"])]] = message
    assert set(found) == set(POISON)
    for what, (key, value) in POISON.items():
        if what == "large":
            assert (found[what].value(), dict(found[what].headers())[OMITTED]) == (None, b"true")
        else:
            assert (found[what].key(), found[what].value()) == (key, value), what
    (place,) = positions_of(flights.settings, flights.id).values()
    assert (place.records_in, place.records_out, place.records_error) == (2 * len(POISON), len(POISON), len(POISON))
    # Through it again: nothing is indexed under the place that a record invented, and what was
    # left out is counted as such.
    again = redrive(flights.settings, flights.pipeline)
    assert (again.looked_at, again.no_origin) == (len(POISON), 1)
    assert set(flights.index()) == set(expected)
