"""The streaming queries by their progress files: whether their process lives, what they said last; on one node, or on several."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from millrace.base.errors import InvalidSettings
from millrace.base.file_lock import is_report_live
from millrace.base.settings import Settings
from millrace.node.range_loop.ownership import assigned_path, read_assigned
from millrace.observe.models import JobView

QUERIES: Final = ("streaming-node", "flusher")


def node_settings(settings: Settings) -> list[Settings]:
    """The settings of the process without a name, and of each node of a cluster that left files here, by name."""
    found = [replace(settings, node="")]
    for folder in sorted((settings.run_path / "nodes").glob("*")):
        with suppress(InvalidSettings):  # no folder of a node's
            found.append(replace(settings, node=folder.name))
    return found


def read_jobs(settings: Settings) -> list[JobView]:
    """Each streaming query; where several nodes run it, as one."""
    nodes = node_settings(settings)
    return [_together([read_job(each, name) for each in nodes]) for name in QUERIES]


def _together(views: Sequence[JobView]) -> JobView:
    """It runs where one of them does: what a node that ended had, others have."""
    running = [each for each in views if each.state == "running"]
    begun = running or [each for each in views if each.at is not None]
    if len(begun) < 2:
        return begun[0] if begun else views[0]
    newest = max(begun, key=lambda each: each.at or 0.0)
    seconds: dict[str, float] = {}
    for each in begun:
        seconds |= {part: max(seconds.get(part, 0.0), took) for part, took in each.seconds.items()}
    return newest.model_copy(
        update={
            "batches": sum(each.batches for each in begun),
            "rows": sum(each.rows for each in begun),
            "log_bytes": sum(each.log_bytes for each in begun),
            "seconds": seconds,
            "failures": {name: words for each in begun for name, words in each.failures.items()},
        }
    )


def pchannel_owners(settings: Settings) -> dict[str, str]:
    """By PChannel the node that has it, as the nodes that run say themselves; empty where none is of a cluster."""
    found: dict[str, str] = {}
    for each in node_settings(settings)[1:]:
        job = read_job(each, QUERIES[0])
        if job.state == "running":
            words = f"{each.node} (process {job.pid})"
            found |= dict.fromkeys(read_assigned(assigned_path(each)), words)
    return found


def read_job(settings: Settings, name: str) -> JobView:
    """One streaming query; a file that is torn or foreign counts as none."""
    try:
        progress = json.loads(settings.progress_path(name).read_text(encoding="utf-8"))
        pid, at = int(progress["pid"]), float(progress["at"])
        beat = _beat(settings, name, pid)
        channels = {str(key): dict(value) for key, value in dict(progress.get("pchannels") or {}).items()}
        return JobView(
            name=name,
            state="running" if is_report_live(settings.run_path, pid, at) else "stopped",
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
    except FileNotFoundError:
        return _before_its_first_batch(settings, name)
    except (ValueError, KeyError, TypeError, AttributeError):
        return JobView(name=name, state="never started")


def _before_its_first_batch(settings: Settings, name: str) -> JobView:
    for beat in _beats(settings, name):
        pid, at = int(beat["pid"]), float(beat["at"])
        if is_report_live(settings.run_path, pid, at):
            doing = str(beat["queries"][name].get("message") or "")[:200]
            return JobView(name=name, state="running", pid=pid, doing=doing)
    return JobView(name=name, state="never started")


def _beat(settings: Settings, name: str, pid: int) -> dict[str, Any]:
    """What the heartbeat of the driver with this process id says of the query."""
    return next((dict(beat["queries"][name]) for beat in _beats(settings, name) if beat["pid"] == pid), {})


def _beats(settings: Settings, name: str) -> Iterator[dict[str, Any]]:
    """The heartbeats of drivers that have the query."""
    for path in settings.node_run_path.glob("*.heartbeat.json"):
        try:
            beat = json.loads(path.read_text(encoding="utf-8"))
            float(beat["at"]), int(beat["pid"])
            if isinstance(beat["queries"][name], dict):
                yield beat
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _slowest(channels: dict[str, dict[str, Any]]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for channel in channels.values():
        for part, seconds in dict(channel.get("seconds") or {}).items():
            parts[str(part)] = max(parts.get(str(part), 0.0), float(seconds))
    return parts
