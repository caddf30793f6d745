"""Act at the failpoints (millrace.base.failpoint) that a test's own thread passes.

    with at_failpoints(act):
        committer.commit(reports)  # act("commit.checked") is called there, act("commit.done") after the commit

`act` may raise, to end the work there, wait for another thread, or do what somebody else would do meanwhile. What `act`
itself passes is not reported, nor what other threads pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from millrace.base import failpoint

Act = Callable[[str], object]


class _Here(threading.local):
    act: Act | None = None


_here = _Here()


class _Watched(dict[str, int]):
    """The table that ``hit`` looks its name up in: each look-up is a visit."""

    def __contains__(self, name: object) -> bool:
        act, _here.act = _here.act, None
        if act is not None:
            try:
                act(str(name))
            finally:
                _here.act = act
        return super().__contains__(name)


@contextmanager
def at_failpoints(act: Act) -> Iterator[None]:
    """Call `act` with the name of each failpoint that this thread passes in the block."""
    if not isinstance(failpoint._armed, _Watched):
        failpoint._armed = _Watched(failpoint._armed)  # type: ignore[misc] # for good: other threads may be in a block
    outer, _here.act = _here.act, act
    try:
        yield
    finally:
        _here.act = outer
