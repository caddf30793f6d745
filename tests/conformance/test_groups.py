"""What log/protocol.py promises of consumer groups, on every backend."""

from __future__ import annotations

import threading

import pytest

from millrace.base.errors import ChannelNotFound, InvalidArgument, LogUnavailable, PositionTruncated
from millrace.log.protocol import Log
from millrace.message.ids import EARLIEST, LogId
from tests.conformance.conftest import Deployment
from tests.conformance.reading import read_all

DEADLINE = 20.0


def test_a_group_has_no_position_before_its_first_move(deployment: Deployment, log: Log) -> None:
    log.append([b"a"])
    assert deployment.service.group_position("g", "dml_0") is None
    assert deployment.service.groups() == []


def test_a_group_stands_where_it_was_moved_forth_and_back(deployment: Deployment, log: Log) -> None:
    ids = log.append([b"%d" % number for number in range(5)])
    for position in (ids[2], ids[4].following(), ids[0], EARLIEST, ids[4], ids[4]):
        deployment.service.move_group("g", "dml_0", position)
        assert deployment.service.group_position("g", "dml_0") == position
    assert deployment.service.groups() == ["g"]


def test_a_group_reads_on_where_it_stood_before_a_restart(deployment: Deployment, log: Log) -> None:
    ids = log.append([b"%d" % number for number in range(5)])
    entries = read_all(log)
    deployment.service.move_group("g", "dml_0", ids[2].following())
    service = deployment.restart()
    position = service.group_position("g", "dml_0")
    assert position == ids[2].following()
    assert service.groups() == ["g"]
    assert read_all(service.open("dml_0"), position) == entries[3:]


def test_groups_and_logs_have_positions_of_their_own(deployment: Deployment) -> None:
    service = deployment.service
    names, groups = ["a", "a0", "ä ö"], ["g", "g0", "Gruppe ä 1", "group.with-signs_"]
    wanted = {}
    for name in names:
        service.create(name)
        ids = service.open(name).append([b"x"] * len(groups))
        for group, position in zip(groups, ids, strict=True):
            wanted[group, name] = position
            service.move_group(group, name, position)
    assert service.groups() == sorted(groups)
    service = deployment.restart()
    assert {key: service.group_position(*key) for key in wanted} == wanted


def test_a_group_that_is_dropped_is_forgotten_everywhere_and_others_stay(deployment: Deployment) -> None:
    service = deployment.service
    positions = {}
    for name in ("a", "b"):
        service.create(name)
        positions[name] = service.open(name).append([b"x"])[0].following()
        for group in ("g", "h"):
            service.move_group(group, name, positions[name])
    service.drop_group("g")
    for _ in range(2):
        assert service.groups() == ["h"]
        assert [service.group_position("g", name) for name in ("a", "b")] == [None, None]
        assert {name: service.group_position("h", name) for name in ("a", "b")} == positions
        service = deployment.restart()


def test_dropping_a_group_that_is_not_there_is_nothing(deployment: Deployment, log: Log) -> None:
    deployment.service.drop_group("nobody")
    deployment.service.move_group("g", "dml_0", EARLIEST)
    deployment.service.drop_group("g")
    deployment.service.drop_group("g")
    assert deployment.service.groups() == []
    deployment.service.move_group("g", "dml_0", EARLIEST)
    assert deployment.service.group_position("g", "dml_0") == EARLIEST


def test_a_log_that_is_made_again_has_no_positions(deployment: Deployment, log: Log) -> None:
    deployment.service.move_group("g", "dml_0", log.append([b"x"])[0])
    if not deployment.promises.destroys:
        with pytest.raises(InvalidArgument, match="removes no partition"):
            deployment.service.drop("dml_0")
        assert deployment.service.group_position("g", "dml_0") is not None
        return
    deployment.service.drop("dml_0")
    deployment.service.create("dml_0")
    assert deployment.service.group_position("g", "dml_0") is None
    assert deployment.restart().group_position("g", "dml_0") is None


def test_a_group_in_a_log_that_is_not_there_is_refused(deployment: Deployment) -> None:
    with pytest.raises(ChannelNotFound):
        deployment.service.group_position("g", "nowhere")
    with pytest.raises(ChannelNotFound):
        deployment.service.move_group("g", "nowhere", EARLIEST)
    assert deployment.service.groups() == []


@pytest.mark.parametrize("position", [LogId(0, -1), LogId(-1, 0), LogId(0, 1 << 63)])
def test_what_is_no_position_is_refused_and_the_group_stays(deployment: Deployment, log: Log, position: LogId) -> None:
    first = log.append([b"x"])[0]
    deployment.service.move_group("g", "dml_0", first)
    with pytest.raises(InvalidArgument):
        deployment.service.move_group("g", "dml_0", position)
    assert deployment.service.group_position("g", "dml_0") == first


def test_a_group_that_truncation_passed_is_told_the_earliest_position(deployment: Deployment, log: Log) -> None:
    ids = log.append([b"%d" % number for number in range(5)])
    deployment.service.move_group("g", "dml_0", ids[1])
    log.truncate(ids[3])
    position = deployment.service.group_position("g", "dml_0")
    assert position == ids[1]
    with pytest.raises(PositionTruncated) as raised:
        log.read(position)
    assert raised.value.earliest == tuple(ids[3])


def test_groups_that_move_at_once_do_not_disturb_each_other(deployment: Deployment, log: Log) -> None:
    ids = log.append([b"%d" % number for number in range(20)])
    failures: list[BaseException] = []

    def walk(group: str) -> None:
        try:
            for position in ids:
                deployment.service.move_group(group, "dml_0", position)
                assert deployment.service.group_position(group, "dml_0") == position
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=walk, args=(f"g{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not failures
    assert deployment.service.groups() == [f"g{number}" for number in range(4)]


def test_a_closed_service_moves_no_group(deployment: Deployment, log: Log) -> None:
    deployment.service.close()
    with pytest.raises(LogUnavailable):
        deployment.service.move_group("g", "dml_0", EARLIEST)
    with pytest.raises(LogUnavailable):
        deployment.service.group_position("g", "dml_0")
    with pytest.raises(LogUnavailable):
        deployment.service.groups()
