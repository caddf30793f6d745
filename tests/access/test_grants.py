"""Roles and patterns: what a principal may do follows from its grants and from nothing else."""

from __future__ import annotations

import pytest

from millrace.access.grants import MAX_PATTERNS, Grant, Principal, Resource, ResourceKind, Role
from millrace.base.errors import InvalidArgument, PermissionDenied

USERS, ORDERS = Resource(ResourceKind.COLLECTION, "users"), Resource(ResourceKind.COLLECTION, "orders")
P0, V0 = Resource(ResourceKind.PCHANNEL, "dml_0"), Resource(ResourceKind.VCHANNEL, "dml_0_7v1")


def who(*grants: Grant) -> Principal:
    return Principal("somebody", grants)


@pytest.mark.parametrize(
    "role, held",
    [
        (Role.READ, {Role.READ}),
        (Role.PRODUCE, {Role.PRODUCE}),
        (Role.OPERATE, {Role.READ, Role.PRODUCE, Role.OPERATE}),
        (Role.ADMIN, set(Role)),
    ],
)
def test_a_role_includes_no_more_than_it_says(role: Role, held: set[Role]) -> None:
    assert {each for each in Role if who(Grant(role)).has_role((each,), (USERS,))} == held


def test_nobody_may_do_anything_without_a_grant() -> None:
    assert not any(who().has_role((role,), resources) for role in Role for resources in (None, (), (USERS,)))


@pytest.mark.parametrize(
    "pattern, covered",
    [
        ("*", {USERS, ORDERS, P0, V0}),
        ("users", {USERS}),
        ("us*", {USERS}),
        ("?sers", {USERS}),
        ("[o-u]*", {USERS, ORDERS}),
        ("collection:*", {USERS, ORDERS}),
        ("pchannel:dml_*", {P0}),
        ("vchannel:dml_0_7v?", {V0}),
        ("group:*", set()),
        ("User*", set()),
        ("use", set()),
    ],
)
def test_a_pattern_covers_what_it_names_of_its_kind(pattern: str, covered: set[Resource]) -> None:
    grant = Grant(Role.READ, (pattern,))
    assert {each for each in (USERS, ORDERS, P0, V0) if grant.covers(each)} == covered


def test_a_role_on_one_thing_is_no_role_on_the_whole() -> None:
    narrow = who(Grant(Role.ADMIN, ("collection:*", "pchannel:*", "vchannel:*", "group:*")))
    assert narrow.has_role((Role.ADMIN,), (USERS,))
    assert narrow.has_role((Role.ADMIN,), None)
    assert not narrow.has_role((Role.ADMIN,), ()), "everything is said by * alone"


def test_each_grant_counts_with_its_own_patterns() -> None:
    mixed = who(Grant(Role.READ), Grant(Role.PRODUCE, ("users",)))
    assert mixed.has_role((Role.PRODUCE,), (USERS,))
    assert mixed.has_role((Role.READ,), (ORDERS,))
    assert not mixed.has_role((Role.PRODUCE,), (ORDERS,))


def test_a_refusal_says_who_lacks_what_on_what_and_what_to_do() -> None:
    with pytest.raises(PermissionDenied) as refused:
        who(Grant(Role.READ)).require_role((Role.PRODUCE,), (USERS,), "append")
    words = str(refused.value)
    assert all(part in words for part in ("'somebody'", "produce", "collection:users", "append", "millrace tokens add"))
    assert not refused.value.retriable
    with pytest.raises(PermissionDenied) as refused:
        who().require_role((Role.READ,), (Resource(ResourceKind.COLLECTION, "x" * 10_000),), "read")
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("text", ["", "collection:", "table:users", "user\ns", "x" * 256, "pchannel:a\0b"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not a pattern"):
        Grant(Role.READ, (text,))


def test_a_grant_has_some_patterns_and_not_too_many() -> None:
    with pytest.raises(InvalidArgument):
        Grant(Role.READ, ())
    with pytest.raises(InvalidArgument):
        Grant(Role.READ, ("users",) * (MAX_PATTERNS + 1))


def test_a_pattern_with_many_stars_is_matched_at_once() -> None:
    assert not Grant(Role.READ, ("a*" * 100 + "b",)).covers(Resource(ResourceKind.COLLECTION, "a" * 255))
