"""Errors cross processes: a worker's is raised again by whoever waits for it."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from millrace.base import errors
from millrace.base.errors import AppendUnresolved, LogError, LogUnavailable, MillraceError

FACTS = {
    "earliest": (1, 2),
    "status": 503,
    "reason": "TXN_EXPIRED",
    "retry_after": 0.5,
    "pack": [b"x"],
    "blocks": ("a",),
    "key": "a",
    "expected_version": 1,
    "current_version": 2,
    "problems": [{"field": "name"}],
}


@pytest.mark.parametrize(
    "kind", [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, MillraceError)]
)
def test_an_error_comes_whole_out_of_another_process(kind: type[MillraceError]) -> None:
    asked = inspect.signature(kind.__init__).parameters
    error = kind("what to do", **{name: value for name, value in FACTS.items() if name in asked})
    error.add_note("where it came from")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again), again.args) == (kind, "what to do", ("what to do",))
        assert vars(again) == vars(error)


def test_a_class_has_its_own_code_and_its_parents_patience() -> None:
    assert (LogError.code, LogUnavailable.code, AppendUnresolved.code) == (
        "LOG",
        "LOG_UNAVAILABLE",
        "APPEND_UNRESOLVED",
    )
    assert (LogUnavailable.retriable, AppendUnresolved.retriable) == (True, False)
