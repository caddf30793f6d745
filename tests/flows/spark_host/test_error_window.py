"""`errors.limit` of a flow on Spark: counts survive restarts, a repeated batch counts once, and a reset begins anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import ErrorLimitExceeded
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.spark_host.error_window import ErrorWindow, reset_window, window_of


def declared(**limit: Any) -> Flow:
    return Flow.of(
        {
            "name": "s",
            "source": {"kind": "collection", "collection": "in"},
            "sink": {"kind": "opensearch", "hosts": ["http://h:1"], "index_base": "i", "key": "id"},
            "errors": {"collection": "letters", **({"limit": limit} if limit else {})},
            "host": "spark",
        }
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


def window(settings: Settings, stream: Flow) -> ErrorWindow:
    """As a process opens it."""
    return window_of(settings, stream)


def test_a_flow_stops_at_its_limit_and_stays_stopped_until_the_count_begins_anew(settings: Settings) -> None:
    stream = declared(count=3)
    window(settings, stream).count(0, records=10, errors=2)
    window(settings, stream).count(1, records=10, errors=1)
    window(settings, stream).count(1, records=10, errors=1)  # it came again after a kill
    with pytest.raises(ErrorLimitExceeded, match=r"s: 4 records failed .* in letters.* flows errors reset s"):
        window(settings, stream).count(2, records=5, errors=1)
    for _ in range(2):
        with pytest.raises(ErrorLimitExceeded):
            window(settings, stream).require_within()
    reset_window(settings, stream)
    window(settings, stream).require_within()
    window(settings, stream).count(2, records=5, errors=1)  # Spark did not note it, so it comes again
    window(settings, stream).count(3, records=5, errors=3)
    with pytest.raises(ErrorLimitExceeded):
        window(settings, stream).count(4, records=5, errors=1)


def test_a_reset_reaches_a_flow_that_runs(settings: Settings) -> None:
    stream = declared(count=3)
    running = window(settings, stream)
    running.count(0, records=3, errors=3)
    reset_window(settings, stream)
    running.count(1, records=3, errors=3)


def test_a_share_is_of_a_window_and_windows_follow_one_another(settings: Settings) -> None:
    stream = declared(share=0.1, over=100)
    for number in range(20):
        window(settings, stream).count(number, records=50, errors=5)
    with pytest.raises(ErrorLimitExceeded, match=r"11 of 100 records"):
        window(settings, stream).count(20, records=50, errors=11)


def test_without_a_limit_nothing_is_counted(settings: Settings) -> None:
    stream = declared()
    window(settings, stream).count(0, records=1, errors=1)
    window(settings, stream).require_within()
    assert not list(settings.data_dir.rglob("window.json"))
