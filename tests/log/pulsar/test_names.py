"""Topics of PChannels, and the settings of a Pulsar log."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidSettings
from millrace.log.pulsar.settings import PulsarCredentials, PulsarSettings, groups_topic, pchannel_of_topic, topic_of

PLACE = "127.0.0.1:6650/millrace/log"
names = st.one_of(st.text(), st.from_regex(r"[a-z.%/-]*-partition-[0-9]{1,3}", fullmatch=True))


@given(prefix=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]*", fullmatch=True), pchannel=names)
def test_every_name_is_a_topic_that_pulsar_takes_and_that_gives_the_name_back(prefix: str, pchannel: str) -> None:
    topic = topic_of(prefix, pchannel)
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", topic)
    assert not re.search(r"-partition-\d+$", topic)
    assert pchannel_of_topic(prefix, topic) == pchannel


@given(st.text())
def test_the_topics_of_other_deployments_are_nobodys(pchannel: str) -> None:
    topic = topic_of("demo2", pchannel)
    assert pchannel_of_topic("demo", topic) is None
    assert pchannel_of_topic("demo", groups_topic("demo")) is None


@pytest.mark.parametrize("topic", ["demo.a.2b", "demo.a.FF", "demo.a.", "demo.ä", "demo.a.41", "demo.x-partition-1"])
def test_a_topic_that_no_name_gives_is_nobodys(topic: str) -> None:
    assert pchannel_of_topic("demo", topic) is None


def test_a_location_says_where_the_brokers_and_the_namespace_are() -> None:
    settings = PulsarSettings.of("a:1,b:2/t/n/demo", {"tls": "true", "batch_bytes": "1000", "send_timeout": "2.5"})
    assert (settings.tenant, settings.namespace, settings.prefix) == ("t", "n", "demo")
    assert settings.service_url == "pulsar+ssl://a:1,b:2"
    assert settings.admin_url == "https://a:8443"
    assert (settings.batch_bytes, settings.send_timeout) == (1000, 2.5)
    assert PulsarSettings.of(PLACE, {"admin": "http://x:1/"}).admin_url == "http://x:1"


@pytest.mark.parametrize(
    ("location", "options"),
    [
        ("127.0.0.1:6650", {}),
        ("127.0.0.1:6650/t", {}),
        ("/t/n", {}),
        (PLACE + "/a/b", {}),
        (PLACE + "/_groups", {}),
        (PLACE, {"token": "secret"}),
        (PLACE, {"password": "secret"}),
        (PLACE, {"batch_bytes": "many"}),
        (PLACE, {"batch_bytes": 0}),
        (PLACE, {"tls": "maybe"}),
        (PLACE, {"admin": "http://name:password@host:8080"}),
        (PLACE, {"max_entry_bytes": 0}),
    ],
)
def test_what_cannot_be_right_is_refused_and_no_secret_is_a_setting(location: str, options: dict[str, object]) -> None:
    with pytest.raises(InvalidSettings):
        PulsarSettings.of(location, options)


def test_credentials_come_from_the_environment_and_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MILLRACE_LOG_{name}", raising=False)
    assert PulsarCredentials.of_environment().header() == {}
    monkeypatch.setenv("MILLRACE_LOG_USERNAME", "ann")
    monkeypatch.setenv("MILLRACE_LOG_PASSWORD", "hidden")
    assert PulsarCredentials.of_environment().header() == {"Authorization": "Basic YW5uOmhpZGRlbg=="}
    monkeypatch.setenv("MILLRACE_LOG_TOKEN", "unseen")
    found = PulsarCredentials.of_environment()
    assert found.header() == {"Authorization": "Bearer unseen"}
    assert "hidden" not in repr(found)
    assert "unseen" not in repr(found)
