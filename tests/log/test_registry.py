"""Backends by scheme.

Who registers one, that nobody else knows their names; a URL with a secret in it is refused, and never repeated.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from millrace.base.errors import InvalidSettings
from millrace.base.log_backends import backend_of
from millrace.base.settings import Settings
from millrace.base.settings.value import without_credentials
from millrace.log.registry import open_service
from millrace.message.ids import EARLIEST

ELSEWHERE = """
from millrace.base.log_backends import LogBackend
from millrace.log.rocksmq.service import open_location

BACKEND = LogBackend(scheme="mine", opener="elsewhere:open_location", form="mine:///folder", retains=True)
"""

SECRET = "hunter2"
WITH_ONE = [
    f"kafka://user:{SECRET}@host:9092/p",
    f"kafka://user:{SECRET}%40host:9092/p",
    f"kafka://user:a/{SECRET}@host:9092/p",
    f"kafka://{SECRET}@host:9092/p",
    f"kafka://host:9092/p?sasl.password={SECRET}",
    f"kafka://host:9092/p?deadline=1&SASL%2Epassword={SECRET}",
    f"pulsar://host:6650/t/n?token={SECRET}",
    f"pulsar://user:{SECRET}@host:6650/t/n",
    f"rocksmq://user:{SECRET}@/data",
]


@pytest.mark.parametrize("url", WITH_ONE)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    for given in (
        lambda: Settings.load(env={"HOME": "/somewhere", "MILLRACE_LOG": url}),
        lambda: Settings(data_dir=Path("/data"), log=url),
        lambda: open_service(url),
    ):
        with pytest.raises(InvalidSettings, match="MILLRACE_LOG_PASSWORD") as told:
            given()
        assert SECRET not in str(told.value)


@pytest.mark.parametrize("url", [f"spark://user:{SECRET}@host:7077", f"k8s://x?token={SECRET}"])
def test_nor_may_sparks_master_have_one(url: str) -> None:
    with pytest.raises(InvalidSettings) as told:
        Settings.load(env={"HOME": "/somewhere", "MILLRACE_SPARK_MASTER": url})
    assert SECRET not in str(told.value)


@pytest.mark.parametrize(
    "url", [f"kafka://h:1/p#{SECRET}", f"kafka://h:1/p?{SECRET}", f"kafka://h:1/p?a={SECRET}&a={SECRET}"]
)
def test_what_is_malformed_is_not_repeated_either(url: str) -> None:
    with pytest.raises(InvalidSettings) as told:
        open_service(url)
    assert SECRET not in str(told.value)


def test_a_folder_may_be_called_as_it_likes() -> None:
    for url in ("rocksmq", "rocksmq:///data/me@host/log", "kafka://a:1,b:2/p?client.id=x", "pulsar://h:1/t/n"):
        assert without_credentials(url, "it") == url


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that registers the backend `mine`; its metadata, to spoil."""
    metadata = tmp_path / "site" / "elsewhere-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    points = metadata / "entry_points.txt"
    points.write_text("[millrace.log_backends]\nmine = elsewhere:BACKEND\n")
    (metadata.parent / "elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(str(metadata.parent))
    monkeypatch.delitem(sys.modules, "elsewhere", raising=False)
    return points


def test_a_package_registers_a_backend_and_settings_and_registry_take_it(elsewhere: Path, tmp_path: Path) -> None:
    url = f"mine://{tmp_path}/log"
    assert Settings(data_dir=tmp_path / "data", log=url).log == url
    assert backend_of(url).retains
    assert not backend_of(url).local
    with open_service(url) as service:
        service.create("dml_0")
        service.open("dml_0").append([b"one"])
    with open_service(f"rocksmq://{tmp_path}/log") as service:
        assert service.open("dml_0").read(EARLIEST).batch.num_rows == 1


def test_a_scheme_that_nobody_registered_is_refused_with_those_there_are(elsewhere: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="the known ones are kafka, mine, pulsar, rocksmq"):
        open_service("other://host/log")
    with pytest.raises(InvalidSettings, match=r"MILLRACE_LOG .*allowed is rocksmq, .* or mine:///folder"):
        Settings.load(env={"HOME": "/somewhere", "MILLRACE_LOG": "other://host/log"})


@pytest.mark.parametrize(
    "target, words", [("elsewhere:NOTHING", "does not load"), ("elsewhere:open_location", "is not a LogBackend")]
)
def test_an_entry_point_that_is_wrong_is_named(elsewhere: Path, target: str, words: str) -> None:
    elsewhere.write_text(f"[millrace.log_backends]\nmine = {target}\n")
    with pytest.raises(InvalidSettings, match=f"mine = {target} .* {words}"):
        open_service("mine:///somewhere")


@pytest.mark.parametrize(("scheme", "module"), [("kafka", "confluent_kafka"), ("pulsar", "pulsar")])
def test_a_client_that_is_not_installed_is_told_with_what_installs_it(
    scheme: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"millrace.log.{scheme}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidSettings, match=rf"{module} is not installed: pip install 'millrace\[{scheme}\]'"):
        open_service(f"{scheme}://127.0.0.1:1/public/default")
