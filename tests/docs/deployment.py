"""A deployment in one process: what jobs/ does with Spark around the same functions, so that a page's examples have tables to read."""

from __future__ import annotations

from millrace.base.settings import Settings
from millrace.client.client import Client
from millrace.node.flush.in_process import flush
from millrace.node.ingest.in_process import catch_up


def commit_what_the_logs_hold(client: Client, settings: Settings) -> None:
    """Bring the ``wal`` table to where the logs end now."""
    catch_up(settings, client.log)


def flush_what_is_committed(settings: Settings) -> None:
    """Bring the collections' tables to where the ``wal`` table stands now."""
    flush(settings)
