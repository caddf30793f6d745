"""What log/protocol.py promises of a deployment's service, on every backend."""

from __future__ import annotations

import pytest

from millrace.base.errors import ChannelExists, ChannelNotFound, LogUnavailable
from millrace.message.ids import EARLIEST
from tests.conformance.conftest import Deployment
from tests.conformance.reading import read_all


def test_logs_are_made_listed_and_destroyed_by_name(deployment: Deployment) -> None:
    service = deployment.service
    assert service.names() == []
    for name in ("b", "a", "by-dev-rootcoord-dml_0", "ä ö"):
        service.create(name)
    assert service.names() == sorted(["b", "a", "by-dev-rootcoord-dml_0", "ä ö"])
    service.drop("a")
    assert "a" not in service.names()
    assert deployment.restart().names() == sorted(["b", "by-dev-rootcoord-dml_0", "ä ö"])


def test_a_log_is_made_once_and_only_an_existing_one_opens(deployment: Deployment) -> None:
    service = deployment.service
    service.create("a")
    with pytest.raises(ChannelExists):
        service.create("a")
    with pytest.raises(ChannelNotFound):
        service.open("b")
    with pytest.raises(ChannelNotFound):
        service.drop("b")


def test_logs_are_apart(deployment: Deployment) -> None:
    service = deployment.service
    for name in ("a", "a0", "0"):
        service.create(name)
        service.open(name).append([name.encode()] * 3)
    for name in ("a", "a0", "0"):
        assert [value for _, value in read_all(service.open(name))] == [name.encode()] * 3


def test_a_log_that_is_made_again_is_empty_and_stays_so(deployment: Deployment) -> None:
    service = deployment.service
    service.create("a")
    service.open("a").append([b"old" * 1000] * 200)
    service.drop("a")
    service.create("a")
    log = service.open("a")
    assert read_all(log) == []
    new = log.append([b"new"])
    service = deployment.restart()
    assert read_all(service.open("a"), EARLIEST) == [(new[0], b"new")]


def test_a_closed_service_closes_its_handles_and_closing_again_is_nothing(deployment: Deployment) -> None:
    deployment.service.create("a")
    with deployment.service as service:
        log = service.open("a")
        log.append([b"x"])
    service.close()
    with pytest.raises(LogUnavailable):
        log.append([b"y"])
    with pytest.raises(LogUnavailable):
        log.read(EARLIEST)
