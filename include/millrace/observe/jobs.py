"""Views of the streaming queries, read from their progress files, on one node or on several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from millrace.base.errors import InvalidSettings
from millrace.base.file_lock import is_report_live
from millrace.base.settings import Settings
from millrace.node.range_loop.ownership import assigned_path, read_assigned
from millrace.observe.models import JobView
from millrace.runtime.heartbeat import read_heartbeats

QUERIES: Final = ("streaming-node", "flusher")


def node_settings(settings: Settings) -> list[Settings]:
    """Return the settings of the unnamed process and of each cluster node that left files here, by name."""
    found = [replace(settings, node="")]
    for folder in sorted((settings.run_path / "nodes").glob("*")):
        with suppress(InvalidSettings):  # not the folder of a node
            found.append(replace(settings, node=folder.name))
    return found


def read_jobs(settings: Settings) -> list[JobView]:
    """Return each streaming query, merged over the nodes that run it."""
    nodes = node_settings(settings)
    return [_merge_views([read_job(each, name) for each in nodes]) for name in QUERIES]


def _merge_views(views: Sequence[JobView]) -> JobView:
    """Merge the views of several nodes.

    A query runs if it runs on one node: others take over what an ended node owned.
    """
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
    """Return the node that owns each PChannel, according to the running nodes. Empty without a cluster."""
    found: dict[str, str] = {}
    for each in node_settings(settings)[1:]:
        job = read_job(each, QUERIES[0])
        if job.state == "running":
            words = f"{each.node} (process {job.pid})"
            found |= dict.fromkeys(read_assigned(assigned_path(each)), words)
    return found


def read_job(settings: Settings, name: str) -> JobView:
    """Read one streaming query. An incomplete or foreign file counts as missing."""
    try:
        progress = json.loads(settings.progress_path(name).read_text(encoding="utf-8"))
        pid, at = int(progress["pid"]), float(progress["at"])
        beat = _beat(settings, name, pid)
        channels = {str(key): dict(value) for key, value in dict(progress.get("pchannels") or {}).items()}
        alive = is_report_live(settings.run_path, pid, at)
        if not alive and (started := _before_its_first_batch(settings, name)).state == "running":
            return started  # the progress is of the job before
        return JobView(
            name=name,
            state="running" if alive else "stopped",
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
    for beat in read_heartbeats(settings.node_run_path, name):
        pid, at = int(beat["pid"]), float(beat["at"])
        if is_report_live(settings.run_path, pid, at):
            doing = str(beat["queries"][name].get("message") or "")[:200]
            return JobView(name=name, state="running", pid=pid, doing=doing)
    return JobView(name=name, state="never started")


def _beat(settings: Settings, name: str, pid: int) -> dict[str, Any]:
    """Return the part of a driver's heartbeat that concerns the query. `pid` selects the driver."""
    return next(
        (dict(beat["queries"][name]) for beat in read_heartbeats(settings.node_run_path, name) if beat["pid"] == pid),
        {},
    )


def _slowest(channels: dict[str, dict[str, Any]]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for channel in channels.values():
        for part, seconds in dict(channel.get("seconds") or {}).items():
            parts[str(part)] = max(parts.get(str(part), 0.0), float(seconds))
    return parts
