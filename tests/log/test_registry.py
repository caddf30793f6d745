"""A URL with a secret in it is refused wherever one is given, and no error repeats it."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.errors import InvalidSettings
from millrace.log.registry import open_service
from millrace.settings import Settings, without_credentials

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
