"""The index of each document if a sink writes into many: a name by date and fields, or through an alias.

Logstash's ``index => "flights-%{[origin]}-%{+YYYY.MM.dd}"`` is ``index_base: flights`` and ``index_suffix:
"-{origin}-{+YYYY.MM.dd}"``. The date is the record's own time, in UTC.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from millrace.flows.declare.paths import date_form, joined, template
from millrace.flows.documents import JSON_ERRORS, MISSING, Digits, Refused, decoded, getter
from millrace.flows.records import Action
from millrace.flows.sinks.opensearch.model import OpenSearchSink as Declared
from millrace.flows.sinks.opensearch.model import index_name

FIRST: Final = "-000001"
"""The suffix of the first index of an alias; OpenSearch counts on from it."""

_MAX_CACHED: Final = 10_000

Part = Callable[[Action, Any], str]


class IndexNames:
    """Names of indices by document. Documents of one date share a cached name."""

    def __init__(self, declared: Declared) -> None:
        texts, paths = template(declared.index_suffix, dates=True)
        self._texts = texts
        self._base = declared.index_base
        self._parts = [_date(path[0]) if is_date(path) else _field(path) for path in paths]
        self._reads = any(not is_date(path) for path in paths)
        self._known: dict[str, str] = {}

    def of(self, action: Action) -> str:
        """Return the name. Raises Refused if the document lacks a field, or its value is not valid in a name."""
        try:
            document = decoded(action.body) if self._reads and action.body is not None else None
        except JSON_ERRORS as error:
            raise Refused("NO_JSON", f"not JSON: {str(error)[:300]}") from None
        found = [self._base, self._texts[0]]
        for part, text in zip(self._parts, self._texts[1:], strict=True):
            found += [part(action, document), text]
        name = "".join(found)
        if name not in self._known:
            try:
                made = index_name(name)
            except ValueError as error:
                raise Refused("INDEX_NAME", f"{name[:300]!r} {error}") from None
            if len(self._known) > _MAX_CACHED:
                self._known.clear()
            self._known[name] = made
        return self._known[name]


def is_date(path: tuple[str, ...]) -> bool:
    """Return whether `path` is a date form rather than a field's path."""
    return path[0].startswith("+")


def pattern_of(declared: Declared) -> str:
    """Return the narrowest pattern that all names of `declared` match."""
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
            words = f"the document has no text or number at {joined(path)!r}, which its index name needs"
            raise Refused("INDEX_NAME", words)
        return value.text if isinstance(value, Digits) else str(value).lower()

    return of
