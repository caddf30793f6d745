"""Turn records into the sink's actions: parse JSON, apply steps, assign an id. Each record may fail with a reason.

done = Transform(flow).run(records)
len(records) == len(done.actions) + len(done.failures) + done.filtered      # always
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from millrace.base.errors import MillraceError
from millrace.flows.debezium.events import Change, Events
from millrace.flows.debezium.events import Rules as EventRules
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.paths import split
from millrace.flows.declare.steps import Lookup, Step
from millrace.flows.documents import MISSING, Document, Refused, decoded, encoded, getter
from millrace.flows.plain import PlainActions, PlainRecords
from millrace.flows.records import FAULT, TRANSFORMATION, VALUE_CONVERTER, Action, Failure, Record, is_truncation
from millrace.flows.registry import sink_kinds
from millrace.flows.sources.kafka.events import event_rules_of, registry_of
from millrace.flows.transform.operators import MAX_DOCUMENT_BYTES, Context, Open, Rows, compile_step
from millrace.runtime.sandbox.errors import TooMuchWork

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Transformed:
    """The outcome of several records, in their order."""

    actions: Sequence[Action] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    filtered: int = 0


class Shown(NamedTuple):
    """A document after one step of a dry run."""

    step: str
    outcome: Literal["document", "filtered", "error"]
    document: dict[str, Any] | None
    reason: str = ""


class Sample(NamedTuple):
    """A dry run of one record: the steps up to its end or failure, and the sink's action."""

    steps: tuple[Shown, ...]
    outcome: Literal["index", "delete", "filtered", "ignored", "error"]
    id: str = ""
    version: int | None = None
    document: dict[str, Any] | None = None
    reason: str = ""


def _no_collections(step: Lookup) -> Rows:
    raise ValueError(f"collection {step.collection} cannot be looked up here")


class _Ignored(Exception):
    """This record needs no action."""


OWN: Final = "own"
"""Ids of a sink that declares none: a document contains its key, and a tombstone's key is its record's."""
_PLACES: Final = frozenset({"position", OWN})
"""Ids that are derived from the record's position."""


class Rules(NamedTuple):
    """The parts of a flow that decide the outcome of a record, without secrets."""

    steps: tuple[Step, ...]
    ids: str
    versions: bool
    tombstones: str
    version_field: str | None = None
    truncates: bool = False
    """Whether the sink can remove all of its rows."""
    debezium: EventRules | None = None
    """How the source's change events are decoded; None if its values are documents."""

    @classmethod
    def of(cls, flow: Flow) -> Rules:
        ids = getattr(flow.sink, "ids", OWN)
        versions = ids not in _PLACES and bool(getattr(flow.sink, "versions", False))
        field = getattr(flow.sink, "version_field", None)
        return cls(
            flow.transform.steps,
            ids,
            versions,
            flow.sink.tombstones,
            field,
            sink_kinds()[flow.sink.kind].truncates,
            event_rules_of(flow.source),
        )


class Hand(Protocol):
    """Receives the record that is being processed."""

    def take(self, offset: int, /) -> None: ...
    def leave(self) -> None: ...


class Transform:
    """A flow's compiled steps. Not thread-safe; create one for each task."""

    def __init__(self, flow: Flow | Rules, *, open_rows: Open = _no_collections) -> None:
        """`open_rows` opens a lookup's collection. Raises ValueError."""
        rules = flow if isinstance(flow, Rules) else Rules.of(flow)
        self._operators = [compile_step(step, place, open_rows) for place, step in enumerate(rules.steps)]
        self._ids, self._versions, self._tombstones = rules.ids, rules.versions, rules.tombstones
        self._truncates = rules.truncates
        self._ordered_by = None if rules.version_field is None else getter(split(rules.version_field))
        self._decode, self._encode = decoded, encoded
        self._context = Context()
        self._events: Events | None = None
        if rules.debezium is not None:
            # Rules have no schema registry, which may need a password, so they decode only JSON.
            registry = None if isinstance(flow, Rules) else registry_of(flow.source)
            self._events = Events(rules.debezium, registry)

    def run(self, records: Sequence[Record], hand: Hand | None = None) -> Transformed:
        """Return the outcome of each record; `hand` is called with each one that reaches the steps.

        An error of a document fails only that document. Raises a MillraceError if a lookup's collection cannot be read.
        """
        if isinstance(records, PlainRecords) and self._passes(records):
            return Transformed(PlainActions(records))
        actions, failures = list[Action](), list[Failure]()
        done = Transformed(actions, failures)
        decode, encode, context, operators = self._decode, self._encode, self._context, self._operators
        by_position, versions = self._ids in _PLACES, self._versions
        take = None if hand is None else hand.take
        change = None if self._events is None else self._change
        try:
            for received in records:
                record, ordered = received, None
                stage, step = VALUE_CONVERTER, "json" if change is None else "debezium"
                try:
                    value = record.value
                    _require_readable(record)
                    document = None
                    if change is not None:
                        record, document, ordered = change(record)
                        value = record.value
                    if value is None:
                        actions.append(self._tombstone(record, ordered))
                        continue
                    if document is None:
                        document = decode(value)
                    if type(document) is not dict:
                        raise Refused(
                            "NO_OBJECT", f"a document must be an object, and this is a {_type_name(document)}"
                        )
                    stage = TRANSFORMATION
                    context.record, context.id = record, None
                    if take is not None:
                        take(record.offset)
                    for step, apply in operators:  # noqa: B007 - named where one of them refuses
                        if not apply(document, context):
                            done.filtered += 1
                            break
                    else:
                        step = "id"
                        name = record.position if by_position else self._id(record, context)
                        body = encode(document)
                        if len(body) > MAX_DOCUMENT_BYTES:
                            raise Refused("TOO_LARGE", f"the document grew to {len(body)} bytes")
                        step = "version"
                        version = self._version(record, document, ordered) if versions else None
                        actions.append(Action(record, name, body, version))
                except _Ignored:
                    done.filtered += 1
                except Refused as error:
                    failures.append(Failure(received, stage, step, error.kind, str(error)))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    failures.append(Failure(received, stage, step, "NO_JSON", f"not JSON: {str(error)[:300]}"))
                except RecursionError:
                    failures.append(Failure(received, stage, step, "TOO_DEEP", "it is nested too deep"))
                except MillraceError:
                    raise
                except Exception as error:
                    # Whatever the error of one document is, the others continue: record it by its type.
                    failures.append(Failure(received, stage, step, type(error).__name__, str(error)[:300]))
        finally:
            if hand is not None:
                hand.leave()
        return done

    def _passes(self, records: PlainRecords) -> bool:
        """Return whether plain records are the sink's documents without any change."""
        if self._operators or self._versions or self._events is not None or self._ids != OWN:
            return False
        removes = self._tombstones == "delete" and (self._truncates or not records or not is_truncation(records[0]))
        return (removes or None not in records.values) and all(
            len(each) <= MAX_DOCUMENT_BYTES for each in records.values if each is not None
        )

    def show(
        self,
        record: Record,
        *,
        keep: Callable[[Document], Document] = copy.deepcopy,
        at: Callable[[str], object] = lambda step: None,
    ) -> Sample:
        """Run without effects and return the document after each step, as copied by `keep`.

        `at` is called with each step before it runs. Raises the errors of `keep`, and MemoryError.
        """
        shown: list[Shown] = []
        context, document, ordered = Context(), None, None
        step = "json" if self._events is None else "debezium"
        try:
            _require_readable(record)
            if self._events is not None:
                record, document, ordered = self._change(record)
            context.record = record
            if record.value is None:
                made = self._tombstone(record, ordered)
                return Sample((), "delete", made.id, made.version)
            if document is None:
                document = self._decode(record.value)
            if type(document) is not dict:
                raise Refused("NO_OBJECT", f"a document must be an object, and this is a {_type_name(document)}")
            for step, apply in self._operators:
                at(step)
                if not apply(document, context):
                    shown.append(Shown(step, "filtered", None))
                    return Sample(tuple(shown), "filtered")
                shown.append(Shown(step, "document", keep(document)))
            step = "id"
            name = record.position if self._ids in _PLACES else self._id(record, context)
            self._encode(document)
            step = "version"
            version = self._version(record, document, ordered) if self._versions else None
            return Sample(tuple(shown), "index", name, version, keep(document))
        except _Ignored:
            return Sample(tuple(shown), "ignored")
        except (TooMuchWork, MemoryError):
            raise
        except msgspec.DecodeError as error:
            reason = f"not JSON: {str(error)[:300]}"
            return Sample((Shown(step, "error", None, reason),), "error", reason=reason)
        except (Exception, RecursionError) as error:
            shown.append(Shown(step, "error", None, str(error)[:300]))
            return Sample(tuple(shown), "error", reason=str(error)[:300])

    def _change(self, record: Record) -> Change:
        assert self._events is not None, "the source has events"
        found = self._events.change(record)
        if found is None:
            raise _Ignored
        return found

    def _id(self, record: Record, context: Context) -> str:
        if self._ids == "template":
            if not context.id:
                raise Refused("NO_ID", "the template produced no id")
            return context.id
        return _key(record)

    def _version(self, record: Record, document: Document, ordered: int | None) -> int:
        """Return the version: of the change event, the record's offset, or the document's field. Raises Refused."""
        if self._ordered_by is None:
            return record.offset if ordered is None else ordered
        value = self._ordered_by(document)
        found = -1
        if type(value) is int:
            found = value
        elif isinstance(value, str):
            found = _microseconds(value)
        if not 0 <= found < 1 << 63:
            raise Refused(
                "NO_VERSION",
                f"the version field holds {_type_name(value)}: it must be a whole number of at least 0,"
                " or a time since 1970 with its zone",
            )
        return found

    def _tombstone(self, record: Record, ordered: int | None = None) -> Action:
        if self._tombstones == "ignore":
            raise _Ignored
        if self._tombstones == "error":
            raise Refused("TOMBSTONE", "the record has no value, and sink.tombstones is error")
        if is_truncation(record):
            if not self._truncates:
                raise Refused(
                    "TRUNCATED", "all rows of the source were removed at once, and the sink cannot follow that"
                )
            return Action(record, "", None, None)
        if self._ids not in ("key", OWN):
            raise Refused(
                "TOMBSTONE",
                f"the record has no value, and ids from {self._ids} cannot delete: use ids by key",
            )
        version = record.offset if ordered is None else ordered
        return Action(record, _key(record), None, version if self._versions else None)


def _require_readable(record: Record) -> None:
    if record.value is not None and len(record.value) > MAX_DOCUMENT_BYTES:
        raise Refused("TOO_LARGE", f"{len(record.value)} bytes; the limit is {MAX_DOCUMENT_BYTES}")
    if record.headers and record.headers[0][0] == FAULT:
        raise Refused("BAD_ROW", (record.headers[0][1] or b"").decode(errors="replace"))


def _key(record: Record) -> str:
    if not record.key:
        raise Refused("NO_KEY", "the record has no key, and ids are by key")
    try:
        return record.key.decode()
    except UnicodeDecodeError:
        raise Refused("NO_KEY", "the record's key is not UTF-8, and ids are by key") from None


def _microseconds(text: str) -> int:
    """Return microseconds since 1970; negative if `text` is not a moment with a zone."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return -1
    return -1 if moment.tzinfo is None else (moment - _EPOCH) // timedelta(microseconds=1)


def _type_name(value: Any) -> str:
    if value is None or value is MISSING:
        return "null" if value is None else "nothing"
    return {str: "string", bool: "bool", list: "list", dict: "object"}.get(type(value), "number")


__all__ = ["Document", "Rules", "Sample", "Shown", "Transform", "Transformed"]
