"""The priority of what may wait: rewriting, behind what streams.

A nice value ranks processes of one session only where the kernel groups processes by session (``sched_autogroup_enabled``, the default
of most distributions; sched(7)), and each launched job has a session of its own. There the group has a nice value, too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

NICE: Final = 10
"""About a tenth of the CPU time that somebody else wants as well; all that nobody does."""

_AUTOGROUP: Final = Path("/proc/self/autogroup")


def lower_priority() -> None:
    """Lower the priority of this process, of what it starts, and of its session where it leads one (a terminal's is not ours)."""
    os.nice(NICE)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without such groups needs no more than the above
            _AUTOGROUP.write_text(str(NICE))
