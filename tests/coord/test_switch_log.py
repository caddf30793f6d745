"""The switch of the log's backend, step by step: what it refuses, what it leaves, what the next run completes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, InvalidSettings, LogBusy, LogUnavailable
from millrace.base.file_lock import exclusive_lock
from millrace.base.log_backends import EMBEDDED
from millrace.base.settings import Settings
from millrace.coord.coordinator import Coordinator
from millrace.coord.switch_log import LOCK, LogSwitch
from millrace.log.generations.generation_file import FILE
from millrace.log.generations.service import GenerationsService, open_deployment_log
from millrace.log.protocol import LogService
from millrace.log.registry import open_service
from millrace.message import builders
from millrace.message.ids import LogId, generation_start
from millrace.message.tombstones import Tombstone
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost
from millrace.wal.chain import CHAIN_VERSION
from millrace.wal.definitions import PChannelDefinitions
from millrace.wal.state import ChannelState


@dataclass
class Hosted:
    """The append host as the coordinator and the switch see it; `chain_version` stands in for what new terms run."""

    host: AppendHost

    def append_one(self, pchannel: str, entry: bytes, *, principal: str = "") -> int:
        return self.host.append(pchannel, entry, deadline=5.0, principal=principal).result().time_tick

    def definitions(self, pchannel: str, collection_id: int | None) -> PChannelDefinitions:
        return self.host.definitions(pchannel, collection_id, deadline=5.0)

    def describe(self, pchannel: str) -> dict[str, Any]:
        return self.host.describe(pchannel)


@dataclass
class Deployment:
    """A deployment in one process, with two PChannels."""

    settings: Settings
    log: GenerationsService
    host: AppendHost
    coordinator: Coordinator

    def switching(self, **changes: Any) -> LogSwitch:
        switch = LogSwitch(self.settings.log_path, "", self.log, Hosted(self.host), self.coordinator, deadline=10.0)
        return replace(switch, **changes)

    def tick(self, name: str = "dml_0") -> int:
        """Have something appended and decided; the generation it is in."""
        self.host.tick(name, deadline=5.0)
        return self.log.open(name).describe().end.generation


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    settings = Settings(data_dir=tmp_path / "data")
    with (
        open_deployment_log(settings.log_path) as log,
        AppendHost(log, ChannelState.new) as host,
        Coordinator(settings, log=log, append=Hosted(host)) as coordinator,
    ):
        coordinator.ensure_pchannels(2)
        yield Deployment(settings, log, host, coordinator)


def place(tmp_path: Path, name: str = "second") -> str:
    return f"rocksmq://{tmp_path}/{name}"


def test_every_pchannel_goes_on_at_the_target_and_the_report_says_where(deployment: Deployment, tmp_path: Path) -> None:
    ends = {name: deployment.log.open(name).describe().end for name in ("dml_0", "dml_1")}
    passed = deployment.switching().run(place(tmp_path))
    assert [each.pchannel for each in passed] == ["dml_0", "dml_1"]
    for each in passed:
        assert each.old_end > ends[each.pchannel]
        assert each.new_begin == generation_start(1)
        assert 0 < each.seconds < 10
    assert deployment.tick("dml_0") == deployment.tick("dml_1") == 1
    (old, new) = deployment.log.file.generations.items
    assert old.closed
    assert (old.since, new.ends) == ({}, {})


@pytest.mark.parametrize("steps", range(6))
def test_a_switch_that_a_node_came_into_stops_before_its_next_step_and_the_next_run_completes_it(
    deployment: Deployment, tmp_path: Path, steps: int
) -> None:
    allowed = iter(range(steps))
    appended: list[str] = []

    def check() -> None:
        if next(allowed, None) is None:
            raise LogBusy("the mark was lost")

    class Counting(Hosted):
        def append_one(self, pchannel: str, entry: bytes, *, principal: str = "") -> int:
            appended.append(pchannel)
            return super().append_one(pchannel, entry, principal=principal)

    switch = deployment.switching(host=Counting(deployment.host), check=check)
    if steps < 5:
        with pytest.raises(LogBusy, match="was lost"):
            switch.run(place(tmp_path))
    else:
        switch.run(place(tmp_path))
    assert len(appended) == min(2, max(0, steps - 2)), "preparing and listing come before the two PChannels"
    deployment.switching().run(place(tmp_path))
    assert deployment.tick("dml_0") == deployment.tick("dml_1") == 1


def places(deployment: Deployment) -> list[str]:
    """Where the log was and is, by what stands on the disk."""
    document = json.loads((deployment.settings.log_path / FILE).read_text())
    return [item["url"] for item in document["body"]["generations"]]


def test_a_switch_that_is_done_is_done(deployment: Deployment, tmp_path: Path) -> None:
    deployment.switching().run(place(tmp_path))
    before = (deployment.settings.log_path / FILE).read_bytes()
    assert deployment.switching().run(place(tmp_path)) == []
    assert deployment.switching().run(place(tmp_path), dry_run=True) == []
    assert (deployment.settings.log_path / FILE).read_bytes() == before


def test_a_dry_run_leaves_the_log_as_it_is(deployment: Deployment, tmp_path: Path) -> None:
    passed = deployment.switching().run(place(tmp_path), dry_run=True)
    assert [(each.pchannel, each.new_begin) for each in passed] == [("dml_0", None), ("dml_1", None)]
    assert places(deployment) == [EMBEDDED]
    assert deployment.tick() == 0
    assert len(deployment.switching().run(place(tmp_path))) == 2


def test_it_goes_there_and_back_to_a_place_of_its_own(deployment: Deployment, tmp_path: Path) -> None:
    for number, to in enumerate((place(tmp_path), "rocksmq", place(tmp_path, "third")), 1):
        assert len(deployment.switching().run(to)) == 2
        assert deployment.tick() == number
    assert (deployment.settings.log_path / "generation-2" / "channels").is_dir()


def test_a_target_that_holds_entries_is_refused_and_the_old_log_stays_in_force(
    deployment: Deployment, tmp_path: Path
) -> None:
    with open_service(place(tmp_path)) as other:
        other.create("dml_1")
        other.open("dml_1").append([b"somebody else's"])
    with pytest.raises(InvalidArgument, match=r"use another location"):
        deployment.switching().run(place(tmp_path))
    assert places(deployment) == [EMBEDDED]
    assert deployment.tick() == 0


def test_what_is_no_log_is_refused(deployment: Deployment) -> None:
    for to in ("nonsense://x", "kafka://user:secret@b:9092/p", "rocksmq://"):
        with pytest.raises(InvalidSettings):
            deployment.switching().run(to)
    assert places(deployment) == [EMBEDDED]


def test_a_target_that_the_server_cannot_open_is_taken_back_before_a_pchannel_is_touched(
    deployment: Deployment, tmp_path: Path
) -> None:
    def refusing(url: str) -> LogService:
        if url == place(tmp_path):
            raise LogUnavailable("no way there from here")
        return open_service(url)

    deployment.log._open_backend = refusing
    with pytest.raises(LogUnavailable, match="no way"):
        deployment.switching(open_target=open_service).run(place(tmp_path))
    assert len(deployment.log.file.refresh().items) == 1
    assert deployment.tick() == 0


def test_another_target_is_refused_while_a_switch_is_under_way_and_the_same_one_completes_it(
    deployment: Deployment, tmp_path: Path
) -> None:
    class Dying(Hosted):
        def append_one(self, pchannel: str, entry: bytes, *, principal: str = "") -> int:
            if pchannel == "dml_1":
                raise InvalidArgument("as if it was killed here")
            return super().append_one(pchannel, entry, principal=principal)

    with pytest.raises(InvalidArgument, match="killed"):
        deployment.switching(host=Dying(deployment.host)).run(place(tmp_path))
    assert [deployment.tick("dml_0"), deployment.tick("dml_1")] == [1, 0]
    with pytest.raises(InvalidArgument, match="in progress"):
        deployment.switching().run(place(tmp_path, "third"))
    left = deployment.switching().run(place(tmp_path), dry_run=True)
    assert [each.pchannel for each in left] == ["dml_1"]
    assert [each.pchannel for each in deployment.switching().run(place(tmp_path))] == ["dml_0", "dml_1"]
    assert [deployment.tick("dml_0"), deployment.tick("dml_1")] == [1, 1]


def test_a_pchannel_that_is_made_while_a_switch_is_under_way_is_no_trouble(
    deployment: Deployment, tmp_path: Path
) -> None:
    class Making(Hosted):
        def append_one(self, pchannel: str, entry: bytes, *, principal: str = "") -> int:
            if pchannel == "dml_1":
                deployment.coordinator.ensure_pchannel("late")
            return super().append_one(pchannel, entry, principal=principal)

    deployment.switching(host=Making(deployment.host)).run(place(tmp_path))
    assert deployment.log.names() == ["dml_0", "dml_1", "late"]
    assert deployment.tick("late") == 1


def test_a_pchannel_that_was_made_in_the_old_backend_behind_the_switchs_back_passes_too(
    deployment: Deployment, tmp_path: Path
) -> None:
    class Late(LogSwitch):
        def _begin(self, file: Any, to: str) -> None:
            deployment.coordinator.ensure_pchannel("late")
            super()._begin(file, to)

    each = deployment.switching()
    late = Late(each.folder, each.url, each.log, each.host, each.terms, each.deadline)
    assert [passed.pchannel for passed in late.run(place(tmp_path))] == ["dml_0", "dml_1", "late"]
    assert deployment.tick("late") == 1


def test_a_term_that_knows_no_alter_wal_is_followed_by_one_that_does(deployment: Deployment, tmp_path: Path) -> None:
    term = deployment.coordinator._store.next_term("dml_0")
    opening = builders.term_opening(term=term, chain_version=1, config={})
    Hosted(deployment.host).append_one("dml_0", encode_entry([opening]))
    deployment.coordinator._store.mark_term_opened("dml_0", term)
    deployment.switching().run(place(tmp_path))
    state = deployment.host.state("dml_0")
    assert (state.term, state.chain_version) == (term + 1, CHAIN_VERSION)
    assert deployment.coordinator.term("dml_1") == 1


def test_a_switch_that_is_taken_back_keeps_a_tombstone_that_came_meanwhile(
    deployment: Deployment, tmp_path: Path
) -> None:
    file = deployment.log.file
    tombstone = Tombstone("dml_0", LogId(0, 5), "0" * 64, "ada", "INC-1", "2026-11-23T07:00:00+00:00", True)

    class Unreachable:
        """The log's service, which cannot open the target."""

        def __getattr__(self, name: str) -> Any:
            return getattr(deployment.log, name)

        def names(self) -> list[str]:
            if file.refresh().newest == 0:
                return deployment.log.names()
            file.change(lambda list_: list_.with_tombstone(tombstone))
            raise LogUnavailable("the target cannot be reached")

    with pytest.raises(LogUnavailable):
        deployment.switching(log=Unreachable()).run(place(tmp_path))
    assert file.refresh().newest == 0
    assert file.generations.tombstones == {"dml_0": {tombstone.entry: tombstone}}


def test_one_switch_at_a_time(deployment: Deployment, tmp_path: Path) -> None:
    with exclusive_lock(deployment.settings.log_path / LOCK, deadline=Deadline.after(0)), pytest.raises(LogBusy):
        deployment.switching().run(place(tmp_path))
