"""The streaming queries by their progress files: whether their process lives, what they said last."""

from __future__ import annotations

import json
from typing import Any, Final

from millrace.base.process import wrote
from millrace.base.settings import Settings
from millrace.observe.models import JobView

QUERIES: Final = ("streaming-node", "flusher")


def read_jobs(settings: Settings) -> list[JobView]:
    """Each streaming query."""
    return [read_job(settings, name) for name in QUERIES]


def read_job(settings: Settings, name: str) -> JobView:
    """One streaming query; a file that is torn or foreign counts as none."""
    try:
        progress = json.loads(settings.progress_path(name).read_text(encoding="utf-8"))
        pid, at = int(progress["pid"]), float(progress["at"])
        beat = _beat(settings, name, pid)
        channels = {str(key): dict(value) for key, value in dict(progress.get("pchannels") or {}).items()}
        return JobView(
            name=name,
            state="running" if wrote(pid, at) else "stopped",
            pid=pid,
            at=at,
            batches=int(progress.get("batches", 0)),
            rows=int(progress.get("rows", 0)),
            log_bytes=int(progress.get("log_bytes", 0)),
            commit_seconds=progress.get("commit_seconds"),
            seconds=_slowest(channels),
            failures={key: str(value["failure"]) for key, value in channels.items() if value.get("failure")},
            doing=str(beat.get("message") or "")[:200],
            busy_seconds=beat.get("busy_seconds"),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return JobView(name=name, state="never started")


def _beat(settings: Settings, name: str, pid: int) -> dict[str, Any]:
    """What the heartbeat of the driver with this process id says of the query."""
    for path in settings.run_path.glob("*.heartbeat.json"):
        try:
            beat = json.loads(path.read_text(encoding="utf-8"))
            if beat["pid"] == pid and name in beat["queries"]:
                return dict(beat["queries"][name])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}


def _slowest(channels: dict[str, dict[str, Any]]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for channel in channels.values():
        for part, seconds in dict(channel.get("seconds") or {}).items():
            parts[str(part)] = max(parts.get(str(part), 0.0), float(seconds))
    return parts
