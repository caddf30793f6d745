"""Settings: precedence, refusals that say what is allowed, and the round trip to another process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings, describe
from millrace.tables.collections.data_tables import rows_uri

HOME = {"HOME": "/somewhere"}


def test_the_environment_goes_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "millrace.toml"
    file.write_text('[millrace]\npchannels = 4\nlog_port = 7000\nmax_entry_bytes = "1MiB"\n')
    settings = Settings.load(env=HOME | {"MILLRACE_PCHANNELS": "8"}, file=file)
    assert (settings.pchannels, settings.log_port, settings.max_entry_bytes) == (8, 7000, 1 << 20)
    assert settings.log == "rocksmq"


def test_the_variable_millrace_config_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "airflow.cfg"
    file.write_text("[core]\nx = %(y)s\n[millrace]\nspark_ui = yes\ntrigger_interval = 0.5\n")
    settings = Settings.load(env=HOME | {"MILLRACE_CONFIG": str(file)})
    assert settings.spark_ui is True
    assert settings.trigger_interval == 0.5


@pytest.mark.parametrize(
    ("env", "data", "cache"),
    [
        ({}, "/somewhere/.local/share/millrace", "/somewhere/.cache/millrace"),
        ({"XDG_DATA_HOME": "/d", "XDG_CACHE_HOME": "/c"}, "/d/millrace", "/c/millrace"),
        ({"XDG_DATA_HOME": "relative"}, "/somewhere/.local/share/millrace", "/somewhere/.cache/millrace"),
        ({"XDG_DATA_HOME": "/d", "MILLRACE_DATA": "/mine", "MILLRACE_CACHE": "/own"}, "/mine", "/own"),
    ],
)
def test_data_and_cache_lie_where_the_xdg_specification_says(env: dict[str, str], data: str, cache: str) -> None:
    settings = Settings.load(env=HOME | env)
    assert (str(settings.data_dir), str(settings.cache_dir)) == (data, cache)


def test_every_place_lies_under_the_data_folder(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    places = [
        settings.log_path,
        Path(settings.wal_uri),
        Path(settings.segments_uri),
        Path(settings.checkpoints_uri),
        Path(rows_uri(settings, 7)),
        settings.spark_checkpoint_path("streaming-node"),
        settings.run_path,
    ]
    assert len(set(places)) == len(places)
    assert all(place.is_relative_to(tmp_path) and place != tmp_path for place in places)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("MILLRACE_PCHANELS", "2", "did you mean MILLRACE_PCHANNELS"),
        ("MILLRACE_PCHANNELS", "0", "1 to 1024"),
        ("MILLRACE_PCHANNELS", "two", "whole number"),
        ("MILLRACE_PCHANNELS", "", "whole number"),
        ("MILLRACE_MAX_BYTES_PER_TRIGGER", "64 megs", "64MiB"),
        ("MILLRACE_MAX_BYTES_PER_TRIGGER", "1", "1024 to"),
        ("MILLRACE_APPEND_DEADLINE", "nan", "0.001 to"),
        ("MILLRACE_APPEND_DEADLINE", "soon", "seconds"),
        ("MILLRACE_SPARK_UI", "maybe", "true or false"),
        ("MILLRACE_SPARK_MEMORY", "lots", "800m or 2g"),
        ("MILLRACE_LOG", "redis://x", "kafka://host:port"),
        ("MILLRACE_DATA", "here", "absolute path"),
        ("MILLRACE_DATA", "", "absolute path"),
    ],
)
def test_a_bad_variable_is_refused_by_name_with_what_is_allowed(variable: str, value: str, words: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        Settings.load(env=HOME | {variable: value})
    assert variable in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "[millrace]\npchanels = 2\n", "did you mean pchannels"),
        ("a.toml", "[millrace\n", "malformed"),
        ("a.toml", "millrace = 3\n", "must be a table"),
        ("a.ini", "[millrace]\nlog_port = 70000\n", "0 to 65535"),
        ("a.ini", "no section\n", "malformed"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidSettings) as caught:
        Settings.load(env=HOME, file=tmp_path / name)
    assert name in str(caught.value)
    assert words in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="cannot be read"):
        Settings.load(env=HOME, file=tmp_path / "none.toml")


def test_values_given_in_code_are_checked_too() -> None:
    with pytest.raises(InvalidSettings, match="MILLRACE_PCHANNELS"):
        Settings(pchannels=0)


def test_names_that_are_not_settings_but_ours_are_left_alone() -> None:
    env = HOME | {"MILLRACE_HOME": "/checkout", "MILLRACE_TEST_SEED": "1", "OTHER": "x", "MILLRACE_CONFIG": ""}
    assert Settings.load(env=env) == Settings.load(env=HOME)


@given(
    pchannels=st.integers(1, 1024),
    deadline=st.floats(0.001, 86400),
    ui=st.booleans(),
    entry=st.integers(1 << 10, 1 << 30),
    port=st.integers(0, 65535),
)
def test_a_started_process_reads_the_same_settings(
    pchannels: int, deadline: float, ui: bool, entry: int, port: int
) -> None:
    settings = Settings(
        data_dir=Path("/data"),
        pchannels=pchannels,
        append_deadline=deadline,
        spark_ui=ui,
        max_entry_bytes=entry,
        metrics_port=port,
    )
    assert Settings.load(env=settings.environment()) == settings


def test_describe_has_a_row_with_words_for_every_setting() -> None:
    rows = describe()
    assert {name for name, *_ in rows} == set(Settings.__dataclass_fields__)
    assert all(env.startswith("MILLRACE_") and words.endswith(".") for _, env, _, words in rows)
    assert ("data_dir", "MILLRACE_DATA") in {(name, env) for name, env, *_ in rows}
