"""The policies that a deployment can choose from, by name."""

from __future__ import annotations

from typing import Final

from millrace.base.errors import InvalidSettings
from millrace.coord.balancer.policy import Policy
from millrace.coord.balancer.vchannelfair import vchannel_fair

POLICIES: Final[dict[str, Policy]] = {"vchannelfair": vchannel_fair}


def find_policy(name: str) -> Policy:
    """Raises InvalidSettings."""
    if name not in POLICIES:
        raise InvalidSettings(f"no balancer policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
