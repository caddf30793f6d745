"""The policies of a Pulsar namespace that a log needs: by default Pulsar would delete unread entries.

They are set when the namespace is created, checked whenever the log is opened, and corrected if the settings allow
it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from millrace.base.errors import InvalidSettings
from millrace.log.pulsar.admin import PulsarAdmin
from millrace.log.pulsar.settings import PulsarSettings

_NO_QUOTA: Final = {"limit": -1, "limitSize": -1, "limitTime": -1, "policy": "producer_exception"}


class _Policy(NamedTuple):
    name: str
    """Name of the field in the namespace's policies."""
    wanted: Any
    path: str
    """Admin path to set it for an existing namespace."""
    method: str
    why: str


_POLICIES: Final = (
    _Policy(
        "deduplicationEnabled", True, "deduplication", "POST", "an append that the client repeats would be doubled"
    ),
    _Policy("message_ttl_in_seconds", 0, "messageTTL", "POST", "entries would expire unread"),
    _Policy(
        "retention_policies",
        {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0},
        "retention",
        "POST",
        "truncation would free nothing",
    ),
    _Policy(
        "subscription_expiration_time_minutes",
        0,
        "subscriptionExpirationTime",
        "POST",
        "the subscription that keeps the log would expire",
    ),
    _Policy(
        "autoTopicCreationOverride",
        {"allowAutoTopicCreation": False},
        "autoTopicCreation",
        "POST",
        "a log that was dropped would come back",
    ),
    _Policy(
        "inactive_topic_policies",
        {
            "deleteWhileInactive": False,
            "maxInactiveDurationSeconds": 60,
            "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
        },
        "inactiveTopicPolicies",
        "POST",
        "a log that is not used would be deleted",
    ),
)
_QUOTAS: Final = ("destination_storage", "message_age")


def ensure_namespace(admin: PulsarAdmin, settings: PulsarSettings) -> None:
    """Ensure that the namespace exists with the policies that a log needs.

    Raises InvalidSettings if it may not be changed.
    """
    found = admin.policies()
    if found is None:
        if not settings.manage_policies:
            raise InvalidSettings(
                f"namespace {settings.tenant}/{settings.namespace} does not exist: create it, or set"
                " pulsar.manage_policies=true"
            )
        found = _create_namespace(admin)
    for policy in _POLICIES:
        if not _holds(found.get(policy.name), policy.wanted):
            _need(settings, policy.name, policy.wanted, policy.why)
            admin.namespace_call(policy.method, policy.path, policy.wanted)
    quotas = found.get("backlog_quota_map") or {}
    for kind in _QUOTAS:
        if (quotas.get(kind) or {}).get("policy") != _NO_QUOTA["policy"]:
            _need(settings, f"backlog_quota_map.{kind}", _NO_QUOTA, "a long backlog would be evicted")
            admin.namespace_call("POST", f"backlogQuota?backlogQuotaType={kind}", _NO_QUOTA)


def _create_namespace(admin: PulsarAdmin) -> dict[str, Any]:
    wanted = {policy.name: policy.wanted for policy in _POLICIES}
    wanted["backlog_quota_map"] = dict.fromkeys(_QUOTAS, _NO_QUOTA)
    admin.create_tenant(admin.clusters())
    admin.create_namespace(wanted)
    return admin.policies() or {}


def _holds(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(found.get(key) == value for key, value in wanted.items())
    return bool(found == wanted)


def _need(settings: PulsarSettings, name: str, wanted: Any, why: str) -> None:
    if not settings.manage_policies:
        raise InvalidSettings(
            f"namespace {settings.tenant}/{settings.namespace} is unsafe for a log: {why}. Set its policy {name}"
            f" to {wanted}"
        )
