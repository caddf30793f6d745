"""Names that come from data lead nowhere else than into the folder that they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.base.data_folder import encode_file_name
from millrace.base.errors import ChannelNotFound
from millrace.base.settings import Settings
from millrace.message.ids import LogId
from millrace.node.range_loop.parking import Parked, park, read_parked, unpark
from millrace.operations.restore.records import read_record, restores_path, write_record

HOSTILE = ["../../escaped", "/etc/escaped", "a/b", "..", ".", "a\0b", "x" * 255, "ü" * 127, "\udcff", "%2F", "a%2Fb"]


def test_a_record_of_a_restore_stays_in_its_folder_whatever_the_collection_is_called(settings: Settings) -> None:
    for number, name in enumerate(HOSTILE):
        write_record(settings, name, {"number": number})
    assert [read_record(settings, name) for name in HOSTILE] == [{"number": each} for each in range(len(HOSTILE))]
    found = {each for each in settings.data_dir.parent.rglob("*") if each.is_file()}
    assert found == set(restores_path(settings).iterdir())
    assert len(found) == len(HOSTILE)


def test_plain_names_stay_as_they_are() -> None:
    for name in ("flights", "Flüge 2013", "a.b-c_d~e", ".hidden"):
        assert encode_file_name(name) == name


@pytest.mark.parametrize("name", ["../settings", "../coord/broken", "", "/etc/x"])
def test_a_pchannel_that_is_not_parked_is_not_looked_for_elsewhere(name: str, tmp_path: Path) -> None:
    folder, other = tmp_path / "parked", tmp_path / "settings.json"
    park(folder, Parked("dml_0", "MALFORMED", "no entry", LogId(0, 1), "2026-11-22T00:00:00+00:00"))
    other.write_text("{}")
    with pytest.raises(ChannelNotFound):
        unpark(folder, name)
    assert other.exists()
    assert [each.pchannel for each in read_parked(folder)] == ["dml_0"]
