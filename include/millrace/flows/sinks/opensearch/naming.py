"""The index of each document, where a sink writes into many: a name by date and by fields, and behind an alias.

Logstash's ``index => "flights-%{[origin]}-%{+YYYY.MM.dd}"`` is ``index_base: flights`` and
``index_suffix: "-{origin}-{+YYYY.MM.dd}"``. The date is the record's own time, in UTC.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from millrace.flows.declare.paths import date_form, joined, template
from millrace.flows.documents import MISSING, Digits, Refused, decoded, getter
from millrace.flows.records import Action
from millrace.flows.sinks.opensearch.model import OpenSearchSink as Declared
from millrace.flows.sinks.opensearch.model import index_name

FIRST: Final = "-000001"
"""The end of the first index behind an alias; OpenSearch counts on from it."""

_KEPT: Final = 10_000

Part = Callable[[Action, Any], str]


class IndexNames:
    """Names of indices by document. Two documents of one date share a name that is made once."""

    def __init__(self, declared: Declared) -> None:
        texts, paths = template(declared.index_suffix, dates=True)
        self._texts = texts
        self._base = declared.index_base
        self._parts = [_date(path[0]) if is_date(path) else _field(path) for path in paths]
        self._reads = any(not is_date(path) for path in paths)
        self._known: dict[str, str] = {}

    def of(self, action: Action) -> str:
        """Return the name. Raises Refused where the document has no such field, or its value makes no name."""
        document = decoded(action.body) if self._reads and action.body is not None else None
        found = [self._base, self._texts[0]]
        for part, text in zip(self._parts, self._texts[1:], strict=True):
            found += [part(action, document), text]
        name = "".join(found)
        if name not in self._known:
            try:
                made = index_name(name)
            except ValueError as error:
                raise Refused("INDEX_NAME", f"{name[:300]!r} {error}") from None
            if len(self._known) > _KEPT:
                self._known.clear()
            self._known[name] = made
        return self._known[name]


def is_date(path: tuple[str, ...]) -> bool:
    """Whether it is a date's form, and no field's path."""
    return path[0].startswith("+")


def pattern_of(declared: Declared) -> str:
    """The pattern that all names of `declared` match, and as few others as a pattern can tell apart."""
    texts, _ = template(declared.index_suffix, dates=True)
    return declared.index_base + "*".join(texts)


def _date(form: str) -> Part:
    wanted = date_form(form[1:])

    def of(action: Action, _: Any) -> str:
        return datetime.fromtimestamp(action.record.timestamp / 1000, UTC).strftime(wanted)

    return of


def _field(path: tuple[str, ...]) -> Part:
    get = getter(path)

    def of(_: Action, document: Any) -> str:
        value = get(document) if type(document) is dict else MISSING
        if value is MISSING or value is None or isinstance(value, dict | list):
            words = f"the document has no text or number at {joined(path)!r}, which names its index"
            raise Refused("INDEX_NAME", words)
        return value.text if isinstance(value, Digits) else str(value).lower()

    return of
