"""Requests of commands to the workers that run a flow, on any machine, and their answers, in the meta store.

    flow-requests/<flow>/<id>            a request
    flow-answers/<flow>/<id>/<worker>    the answer of a worker

Both are under one lease, which ends with the deadline of the command at the latest. Workers look once a second.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from millrace.base.deadline import Deadline
from millrace.base.errors import (
    DeadlineExceeded,
    FlowNotRunning,
    InvalidArgument,
    LeaseNotFound,
    MetaAmbiguous,
    MetaUnavailable,
    MillraceError,
)
from millrace.base.settings import Settings
from millrace.flows.hold import process_store
from millrace.flows.sources.division import PREFIX as MEMBERS
from millrace.flows.sources.division import members
from millrace.meta.store import MetaStore, Put
from millrace.rpc.wire import error_from_bytes, error_to_bytes

REQUESTS: Final = "flow-requests/"
ANSWERS: Final = "flow-answers/"
SECONDS: Final = 10.0
"""Default time to wait for answers."""
MAX_ANSWER: Final = 256 << 10
"""Maximum bytes of an answer."""
AT_ONCE: Final = 16
"""Requests that a worker answers in one look; the others wait for the next."""
_POLL: Final = 0.1

_logger: Final = logging.getLogger(__name__)

Handler = Callable[[Mapping[str, Any]], Any]
"""Answers a request with what JSON can hold. Raises MillraceError."""


def running_flows(settings: Settings) -> dict[str, tuple[str, ...]]:
    """Return the workers that have leases, by flow; none without a meta store. Raises MetaUnavailable."""
    if not settings.meta_store:
        return {}
    store = process_store(settings.meta_store)
    flows = {each.key.removeprefix(MEMBERS).partition("/")[0] for each in store.list(MEMBERS).entries}
    return {flow: members(store, flow) for flow in sorted(flows)}


def ask(
    settings: Settings, flow: str, what: str, arguments: Mapping[str, Any], *, seconds: float = SECONDS
) -> dict[str, Any]:
    """Ask the workers of `flow`; return the answers that came in time, by worker.

    Raises FlowNotRunning, DeadlineExceeded if none answered, MetaUnavailable, MetaAmbiguous, and what a worker raised.
    """
    if not settings.meta_store:
        raise FlowNotRunning(f"{flow!r} does not run on this machine, and there is no meta store that knows others")
    store, end = process_store(settings.meta_store), Deadline.after(seconds)
    if not (workers := members(store, flow)):
        raise FlowNotRunning(f"no machine runs {flow!r}: start it, and try again")
    number = uuid.uuid4().hex
    lease = store.grant(seconds + 1.0)
    try:
        body = json.dumps({"what": what, "arguments": dict(arguments)}).encode()
        store.commit([Put(f"{REQUESTS}{flow}/{number}", body, lease)])
        while True:
            found = _answers(store, flow, number)
            if found.keys() >= set(workers) or (found and found.keys() >= set(members(store, flow))):
                break
            if not end.pause(_POLL):
                break
    finally:
        with suppress(MetaUnavailable, MetaAmbiguous):  # it ends by itself
            store.revoke(lease)
    if not found:
        raise DeadlineExceeded(
            f"{', '.join(workers)} has the lease of {flow!r} and did not answer within {seconds:.0f} s: it may be"
            " suspended, or of an earlier build. Try again, or run the command on its machine"
        )
    for answer in found.values():
        if "error" in answer:
            raise error_from_bytes(answer["error"].encode())
    return {worker: answer["value"] for worker, answer in found.items()}


def _answers(store: MetaStore, flow: str, number: str) -> dict[str, dict[str, Any]]:
    prefix = f"{ANSWERS}{flow}/{number}/"
    found = [json.loads(each.value) for each in store.list(prefix).entries]
    return {str(each["worker"]): each for each in found}


class Requests:
    """A worker's side. One thread uses it."""

    def __init__(self, settings: Settings, flow: str, worker: str, handlers: Mapping[str, Handler]) -> None:
        """`worker` is its name among those that have leases."""
        self._settings, self._flow, self._worker, self._handlers = settings, flow, worker, handlers
        self._answered: frozenset[str] = frozenset()

    def answer(self) -> None:
        """Answer the requests since the last call. Raises MetaUnavailable, MetaAmbiguous."""
        if not self._settings.meta_store:
            return
        store = process_store(self._settings.meta_store)
        asked = {each.key: each for each in store.list(f"{REQUESTS}{self._flow}/").entries}
        self._answered &= asked.keys()
        for key in [each for each in asked if each not in self._answered][:AT_ONCE]:
            answer = {"worker": self._worker, **self._handled(asked[key].value)}
            number = key.rpartition("/")[2]
            place = f"{ANSWERS}{self._flow}/{number}/{uuid.uuid4().hex[:8]}"
            with suppress(LeaseNotFound):  # nobody waits for it any more
                store.commit([Put(place, json.dumps(answer).encode(), asked[key].lease)])
            self._answered |= {key}

    def _handled(self, body: bytes) -> dict[str, Any]:
        try:
            asked = json.loads(body)
            handler = self._handlers.get(asked["what"])
            if handler is None:
                raise InvalidArgument(f"the worker of {self._flow!r} cannot answer {str(asked['what'])[:40]!r}")
            value = handler(asked["arguments"])
            if len(json.dumps(value)) > MAX_ANSWER:
                raise InvalidArgument(f"the answer is larger than {MAX_ANSWER >> 10} KiB: ask for less")
            return {"value": value}
        except MillraceError as error:
            return {"error": error_to_bytes(error).decode()}
        except (ValueError, KeyError, TypeError, OSError) as error:
            _logger.warning("a request of %s could not be answered: %s", self._flow, error)
            words = f"the request could not be answered ({type(error).__name__}): its worker's log says why"
            return {"error": error_to_bytes(InvalidArgument(words)).decode()}
