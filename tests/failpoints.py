"""Act at the failpoints (millrace.base.failpoint) that a test's own thread passes.

    with at_failpoints(act):
        committer.commit(reports)  # act("commit.checked") is called there, act("commit.done") after the commit

`act` may raise, to end the work there, wait for another thread, or do what somebody else would do meanwhile. What `act`
itself passes is not reported, nor what other threads pass.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import millrace
from millrace.base import failpoint

_ROOT = Path(__file__).resolve().parents[1]

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


def die_at(place: str, module: str, *arguments: object) -> None:
    """Run `python -m module arguments` in a process that kills itself at a failpoint, and check that it did."""
    paths = [str(Path(millrace.__file__).parent.parent), str(_ROOT)]
    ended = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, failpoint.VARIABLE: place, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=_ROOT,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
