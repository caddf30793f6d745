"""Which log the demo runs on, and that it never mixes two in one data folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.demo.__main__ import BROKERS, running_log
from millrace.tables.wal.table import WalTable


@pytest.mark.parametrize(
    ("named", "kind"),
    [("rocksmq", ""), ("rocksmq", "rocksmq"), ("kafka://host:1/p", ""), ("kafka://host:1/p", "kafka")],
)
def test_a_log_that_the_settings_name_is_taken_as_it_is(settings: Settings, named: str, kind: str) -> None:
    given = replace(settings, log=named)
    with running_log(given, kind, Console(quiet=True)) as found:
        assert found is given


def test_a_log_of_another_kind_than_the_settings_name_is_refused(settings: Settings) -> None:
    given = replace(settings, log="pulsar://host:1/a/b")
    with pytest.raises(InvalidSettings, match="choose one"), running_log(given, "kafka", Console(quiet=True)):
        pass


def test_a_data_folder_of_one_log_is_not_used_with_another(settings: Settings) -> None:
    WalTable.create(Path(settings.wal_uri))
    with pytest.raises(InvalidSettings, match="LOG=rocksmq"), running_log(settings, "kafka", Console(quiet=True)):
        pass
    (settings.data_dir / BROKERS / "kafka").mkdir(parents=True)
    for kind in ("", "rocksmq", "pulsar"):
        with pytest.raises(InvalidSettings, match="LOG=kafka"), running_log(settings, kind, Console(quiet=True)):
            pass
