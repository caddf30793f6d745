"""Which log the demo runs on, and that it never mixes two in one data folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.demo.__main__ import BROKERS, running_log
from millrace.demo.cluster_faults import demo_servers
from millrace.tables.wal.table import WalTable


@contextmanager
def _running(settings: Settings, kind: str) -> Iterator[Settings]:
    with demo_servers() as servers, running_log(settings, kind, servers, Console(quiet=True)) as found:
        assert not servers.all
        yield found


@pytest.mark.parametrize(
    ("named", "kind"),
    [("rocksmq", ""), ("rocksmq", "rocksmq"), ("kafka://host:1/p", ""), ("kafka://host:1/p", "kafka")],
)
def test_a_log_that_the_settings_name_is_taken_as_it_is(settings: Settings, named: str, kind: str) -> None:
    given = replace(settings, log=named)
    with _running(given, kind) as found:
        assert found is given


def test_a_log_of_another_kind_than_the_settings_name_is_refused(settings: Settings) -> None:
    given = replace(settings, log="pulsar://host:1/a/b")
    with pytest.raises(InvalidSettings, match="choose one"), _running(given, "kafka"):
        pass


def test_a_data_folder_of_one_log_is_not_used_with_another(settings: Settings) -> None:
    WalTable.create(Path(settings.wal_uri))
    with pytest.raises(InvalidSettings, match="LOG=rocksmq"), _running(settings, "kafka"):
        pass
    (settings.data_dir / BROKERS / "kafka").mkdir(parents=True)
    for kind in ("", "rocksmq", "pulsar"):
        with pytest.raises(InvalidSettings, match="LOG=kafka"), _running(settings, kind):
            pass
