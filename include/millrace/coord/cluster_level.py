"""The level of a cluster: what its processes may write, so that builds one version apart can run together.

A build that reads something new first learns to read it, and writes it from a level on. The cluster's level is in the
meta store. It rises only when a person finishes an upgrade (``millrace upgrade finish``), and only if every living node
knows the new one. So during a rolling upgrade the new nodes write what the old ones read, and a node can go back to the
old build until the upgrade is finished.

- A node registers the newest level that its build knows, under its session's lease. One that registers none is of a
  build from before levels, and knows level 1.
- The first process of this build that finds no level stores one: 1 if a node of such a build is alive, else the newest.
- A process that does not know the cluster's level refuses to run (UnsupportedVersion).

A deployment that is no cluster has no level: all its processes are of one build.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from millrace.base.errors import FeatureNotActive, MetaUnavailable, UnsupportedVersion, UpgradeRefused
from millrace.base.package import VERSION
from millrace.base.settings import Settings
from millrace.coord.clock import SystemClock
from millrace.coord.cluster_file import is_cluster
from millrace.coord.session import LEVEL, LEVELS_PREFIX, NODE_PREFIX, NodeInfo
from millrace.coord.store_factory import open_cluster_store
from millrace.meta.store import MetaStore, Put, RevisionEquals
from millrace.wal.versions import CHAIN_VERSION, VERSION_4, VERSION_5

LEVEL_KEY: Final = "control/level"
LEVEL_VERSION: Final = 1
"""Version of the document at LEVEL_KEY."""

BEFORE_LEVELS: Final = 1
NEWEST: Final = LEVEL
CHAIN_OF: Final = {1: VERSION_4, 2: VERSION_5}
"""Chain version of new terms at each level."""
FEATURES: Final = {2: ("entries that name their principal (chain 5)", "moves of the tables")}
"""Features that are off below each level."""
_ATTEMPTS: Final = 20


@dataclass(frozen=True, slots=True)
class UpgradeStatus:
    """The progress of a cluster's upgrade."""

    level: int
    newest: int
    """Level that this build knows."""
    nodes: dict[str, int]
    """Newest level that the build of each living node knows."""

    @property
    def lagging(self) -> list[str]:
        """Nodes that must be upgraded before the level can rise to `newest`."""
        return sorted(name for name, level in self.nodes.items() if level < self.newest)


def cluster_level(store: MetaStore) -> int:
    """Return the cluster's level, and store one if there is none. Raises UnsupportedVersion, MetaUnavailable."""
    for _ in range(_ATTEMPTS):
        there = store.get(LEVEL_KEY)
        if there is not None:
            return _decode(there.value)
        lagging = [name for name, level in _node_levels(store).items() if level < NEWEST]
        level = BEFORE_LEVELS if lagging else NEWEST
        store.commit([Put(LEVEL_KEY, _encode(level))], when=[RevisionEquals(LEVEL_KEY, 0)])
    raise MetaUnavailable("the meta store does not keep the cluster's level: retry")


def upgrade_status(store: MetaStore) -> UpgradeStatus:
    """Return the progress of an upgrade. Raises what :func:`cluster_level` raises."""
    return UpgradeStatus(cluster_level(store), NEWEST, _node_levels(store))


def finish_upgrade(store: MetaStore) -> UpgradeStatus:
    """Raise the cluster's level to the newest. From then on no earlier build can take part.

    Raises UpgradeRefused while a living node is of an earlier build, and what :func:`cluster_level` raises.
    """
    for _ in range(_ATTEMPTS):
        status = upgrade_status(store)
        if status.lagging:
            raise UpgradeRefused(
                f"the nodes {', '.join(status.lagging)} run an earlier build: upgrade them, or stop them, and run this"
                " again"
            )
        there = store.get(LEVEL_KEY)
        if there is not None and _decode(there.value) == NEWEST:
            return status
        revision = 0 if there is None else there.modified
        store.commit([Put(LEVEL_KEY, _encode(NEWEST))], when=[RevisionEquals(LEVEL_KEY, revision)])
    raise MetaUnavailable("other processes kept changing the cluster's level: retry")


def level_of(settings: Settings) -> int:
    """Return the level of the deployment's cluster; the newest if it is none."""
    if not is_cluster(settings):
        return NEWEST
    with open_cluster_store(settings, SystemClock()) as store:
        return cluster_level(store)


def chain_version_of(settings: Settings) -> int:
    """Return the chain version of new terms."""
    return CHAIN_OF.get(level_of(settings), CHAIN_VERSION)


def require_level(settings: Settings, level: int, what: str) -> None:
    """Raise FeatureNotActive if the deployment is a cluster whose upgrade is not finished."""
    found = level_of(settings)
    if found < level:
        raise FeatureNotActive(
            f"{what} need level {level}, and the cluster has level {found}: upgrade every node, then finish the upgrade"
            " (millrace upgrade finish)"
        )


def known_level(store: MetaStore, session: str) -> int:
    """Return the newest level that the build of a node's session knows."""
    there = store.get(f"{LEVELS_PREFIX}{session}")
    return BEFORE_LEVELS if there is None else int(json.loads(there.value)["level"])


def _node_levels(store: MetaStore) -> dict[str, int]:
    known = {
        entry.key.removeprefix(LEVELS_PREFIX): int(json.loads(entry.value)["level"])
        for entry in store.list(LEVELS_PREFIX).entries
    }
    found: dict[str, int] = {}
    for entry in store.list(NODE_PREFIX).entries:
        session = entry.key.removeprefix(NODE_PREFIX)
        name = NodeInfo.decode(entry.value).name
        level = known.get(session, BEFORE_LEVELS)
        found[name] = min(level, found.get(name, level))
    return found


def _encode(level: int) -> bytes:
    return json.dumps({"form": LEVEL_VERSION, "level": level, "release": VERSION}).encode()


def _decode(data: bytes) -> int:
    found = json.loads(data)
    if found["form"] > LEVEL_VERSION or found["level"] > NEWEST:
        raise UnsupportedVersion(
            f"the cluster has level {found['level']}, and this build knows {NEWEST}: run Millrace {found['release']} or"
            " a newer release"
        )
    return int(found["level"])
