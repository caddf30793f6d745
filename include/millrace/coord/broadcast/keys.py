"""Resource keys: what a broadcast works on, shared or for itself. Those that conflict run one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

CLUSTER: Final = "cluster"
COLLECTION: Final = "collection"


@dataclass(frozen=True, slots=True, order=True)
class ResourceKey:
    domain: str
    name: str = ""
    shared: bool = False


SHARED_CLUSTER: Final = ResourceKey(CLUSTER, "", shared=True)


def normalize_keys(keys: Iterable[ResourceKey]) -> tuple[ResourceKey, ...]:
    """Sorted, each resource once (for itself where both are asked for), and the cluster shared where it is not asked for."""
    strongest: dict[tuple[str, str], ResourceKey] = {}
    for key in [SHARED_CLUSTER, *keys]:
        known = strongest.get((key.domain, key.name))
        if known is None or known.shared:
            strongest[key.domain, key.name] = key
    return tuple(sorted(strongest.values()))


def keys_conflict(one: Iterable[ResourceKey], other: Iterable[ResourceKey]) -> bool:
    """Whether two broadcasts may not run at the same time."""
    held = {(key.domain, key.name): key.shared for key in one}
    return any(not (key.shared and held[key.domain, key.name]) for key in other if (key.domain, key.name) in held)
