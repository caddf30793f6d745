"""Every call of the server with every kind of token.

Let in where the table says so, refused with PERMISSION_DENIED elsewhere.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from millrace.access.grants import EVERYTHING, Grant, ResourceKind, Role
from millrace.access.permissions import MESSAGE_REQUIREMENTS, Scope
from millrace.access.token_file import TokenFile
from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, MillraceError, PermissionDenied
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.server.flight import LogServer
from millrace.message.types import BEHAVIOUR, Flag, MessageType
from millrace.node.append.host import AppendHost
from millrace.node.append.server import AppendExtension
from millrace.rpc import calls
from millrace.rpc.calls import CATALOG_PREFIX, SERVER_CALLS, Repeat, ServerCall, handlers_of, handles, server_calls
from millrace.rpc.link import ConnectionLost, ExchangeStream, Link
from millrace.rpc.wire import TIMEOUT, to_json
from millrace.wal.state import ChannelState
from tests.access.conftest import NARROW, SCHEMA, Guarded

ROLES = {str(role): Role(role) for role in Role} | {f"narrow {role}": Role(role) for role in Role}
NOBODY = ("none", "wrong", "revoked", "expired")
DESTRUCTIVE = {
    "drop",
    "truncate",
    "retain",
    "shutdown",
    "drop_group",
    "do_exchange",
    "create",
    "append/drop_group",
    "append/reset_group",
    "append/tombstone",
    "accept_clock",
}
NOT_THERE = "not-there"
EXCHANGES = {"do_exchange": {"append": NOT_THERE}, "append/do_exchange": {"extension": "append", "pchannel": "dml_0"}}
GETS = {"do_get": {"pchannel": NOT_THERE, "position": [0, 0]}} | {
    each.key: {"extension": "append", each.ticket: {"tail": "dml_0", "read": "users"}.get(each.ticket, NOT_THERE)}
    | ({each.argument: NOT_THERE} if each.argument else {})
    for each in SERVER_CALLS.values()
    if each.ticket
}
ARGUMENTS = {
    "pchannel": NOT_THERE,
    "group": NOT_THERE,
    "vchannel": "dml_0_1v0",  # of users, which narrow tokens may read
    "position": [0, 0],
    "allowed": [0, 0],
    "entry": [0, 0],
    "name": NOT_THERE,
    "alias": NOT_THERE,
    "collection": NOT_THERE,
    "partition": NOT_THERE,
    "producer_id": 5,
    "count": 0,
    "field": {},
    "schema": SCHEMA.to_json(),
    "vchannels": 0,
    "partitions": [],
}
"""What no call can do anything with, or harm anything."""


def call(link: Link, name: str) -> None:
    """Make a call; raises what it is answered with."""
    if name in EXCHANGES:
        stream = ExchangeStream(link, EXCHANGES[name])
        try:
            stream.request(pa.array([b""], pa.large_binary()), TIMEOUT.pack(5.0), deadline=Deadline.after(20))
            stream.answer(deadline=Deadline.after(20))
        finally:
            stream.close()
    elif name in GETS:
        link.get(GETS[name], timeout=20)
    elif name.startswith(CATALOG_PREFIX):
        request = {"call": name.removeprefix(CATALOG_PREFIX), "arguments": ARGUMENTS}
        link.act("append/catalog", request, timeout=20)
    else:
        list(link.client.do_action(flight.Action(name, to_json(ARGUMENTS)), link.options(20)))


def let_in(link: Link, name: str) -> bool:
    """Return whether the server admitted a call, whatever the call itself then answered."""
    try:
        call(link, name)
    except PermissionDenied:
        return False
    except (MillraceError, flight.FlightError) as error:
        if re.search(f"knows no action|has no call '{name.removeprefix(CATALOG_PREFIX)}'", str(error)):
            pytest.fail(f"The table names {name}; the server has no such call.")
        typed = getattr(error, "extra_info", b"")
        return b"PERMISSION_DENIED" not in typed
    return True


def expected(name: str, token: str) -> bool:
    """What the table says; narrow tokens are for nothing that ARGUMENTS names."""
    need, role = SERVER_CALLS[name], ROLES[token]
    return bool(set(need.roles) & role.implied_roles) and (
        need.scope is Scope.ANYTHING or not token.startswith("narrow")
    )


@pytest.mark.parametrize("token", ROLES)
def test_a_token_makes_the_calls_that_the_table_allows_and_no_other(
    guarded: Guarded, tokens: Mapping[str, str], token: str
) -> None:
    with guarded.link(tokens[token]) as link:
        wrong = [
            name
            for name in sorted(SERVER_CALLS.keys() - {"shutdown"})
            if let_in(link, name) is not expected(name, token)
        ]
    assert wrong == []


@pytest.mark.parametrize("token", NOBODY)
def test_nobody_without_a_good_token_makes_any_call(guarded: Guarded, tokens: Mapping[str, str], token: str) -> None:
    if token == "expired":
        clock = iter([0.0, 0.0, time.time()])
        given = TokenFile(guarded.client.settings.data_dir, clock=lambda: next(clock)).add(
            "old", (Grant(Role.ADMIN),), expires=1.0
        )[0]
    else:
        given = tokens[token]
    for name in sorted(SERVER_CALLS):
        # A link each: a connection that was refused once gives no other answer.
        with guarded.link(given) as link, pytest.raises((ConnectionLost, flight.FlightUnauthenticatedError)) as refused:
            call(link, name)
        assert "token" in str(refused.value), name


@pytest.mark.parametrize("token", [each for each in ROLES if each != "admin"])
def test_only_an_admin_of_everything_stops_the_server(guarded: Guarded, tokens: Mapping[str, str], token: str) -> None:
    with guarded.link(tokens[token]) as link, pytest.raises(PermissionDenied):
        link.act("shutdown", {}, timeout=20)


def test_an_admin_stops_the_server(start: Callable[[], Guarded]) -> None:
    own = start()
    with own.client, own.link(own.add("boss", Grant(Role.ADMIN))) as link:
        assert link.act("shutdown", {}, timeout=20) == {}


@pytest.mark.parametrize("token", ROLES)
def test_what_is_no_call_is_refused_to_everybody(guarded: Guarded, tokens: Mapping[str, str], token: str) -> None:
    descriptor = flight.FlightDescriptor.for_command(b"{}")
    with guarded.link(tokens[token]) as link:
        for name in ("rm", "append/rm", "append/catalog/term", "append/do_get", "do_get", "", "/", "../shutdown"):
            with pytest.raises((InvalidArgument, PermissionDenied)):
                link.act(name, ARGUMENTS, timeout=20)
        with pytest.raises(InvalidArgument, match="has no call"):
            link.act("append/catalog", {"call": "../shutdown"}, timeout=20)
        for other in (
            lambda: link.client.do_put(descriptor, pa.schema([]), link.options(20))[0].close(),
            lambda: list(link.client.list_flights(options=link.options(20))),
            lambda: link.client.get_flight_info(descriptor, link.options(20)),
            lambda: link.client.get_schema(descriptor, link.options(20)),
            lambda: list(link.client.list_actions(link.options(20))),
        ):
            with pytest.raises((flight.FlightError, pa.ArrowException, NotImplementedError)):
                other()


def test_a_call_without_a_role_is_refused_where_it_is_declared() -> None:
    with pytest.raises(InvalidArgument, match="'rm' has no role"):
        ServerCall(name="rm", roles=(), scope=Scope.ANYTHING)


def test_a_server_does_not_start_with_a_call_that_has_no_handler_or_a_handler_that_has_no_call() -> None:
    class Server:
        @handles(calls.PING)
        def ping(self) -> None: ...

    class TwoHandlers(Server):
        @handles(calls.PING)
        def ping_again(self) -> None: ...

    assert handlers_of(Server(), [calls.PING]).keys() == {"ping"}
    with pytest.raises(InvalidArgument, match="'names' has no handler"):
        handlers_of(Server(), [calls.PING, calls.NAMES])
    with pytest.raises(InvalidArgument, match="handler of 'ping' has no entry"):
        handlers_of(Server(), [])
    with pytest.raises(InvalidArgument, match="'ping' has two handlers"):
        handlers_of(TwoHandlers(), [calls.PING])


def test_the_log_server_and_its_append_host_refuse_to_start_without_a_handler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with RocksMQ(tmp_path) as service, AppendHost(service, ChannelState.new) as host:
        starts = {
            "new": lambda: LogServer(service, tokens=["a-token-of-the-test"]),
            "append/new": lambda: AppendExtension(host),
        }
        for name, start in starts.items():
            with monkeypatch.context() as patch:
                patch.setitem(SERVER_CALLS, name, ServerCall(name=name, roles=(Role.READ,), scope=Scope.EVERYTHING))
                with pytest.raises(InvalidArgument, match=f"'{name}' has no handler"):
                    start()


def test_a_call_belongs_to_one_part_of_the_server_and_has_a_request_id_if_it_is_repeated_by_that() -> None:
    assert SERVER_CALLS.keys() == {each.key for part in ("", "append/", CATALOG_PREFIX) for each in server_calls(part)}
    for each in SERVER_CALLS.values():
        assert ("request?" in each.request) == (each.repeat is Repeat.REQUEST_ID), each.key


def test_what_destroys_is_for_admins_alone() -> None:
    drops = {CATALOG_PREFIX + "drop_collection", CATALOG_PREFIX + "drop_partition"}
    assert {name for name, need in SERVER_CALLS.items() if need.roles == (Role.ADMIN,)} == DESTRUCTIVE | drops
    assert not any(Role.ADMIN in need.roles and len(need.roles) > 1 for need in SERVER_CALLS.values())


def test_every_type_of_message_has_its_role() -> None:
    assert MESSAGE_REQUIREMENTS.keys() == BEHAVIOUR.keys()
    below = {kind: need.roles for kind, need in MESSAGE_REQUIREMENTS.items() if need.roles != (Role.ADMIN,)}
    assert below == {
        MessageType.INSERT: (Role.PRODUCE,),
        MessageType.DELETE: (Role.PRODUCE,),
        MessageType.UPSERT: (Role.PRODUCE,),
        MessageType.BEGIN_TXN: (Role.PRODUCE,),
        MessageType.COMMIT_TXN: (Role.PRODUCE,),
        MessageType.ROLLBACK_TXN: (Role.PRODUCE,),
        MessageType.KEEP_ALIVE: (Role.PRODUCE,),
        MessageType.MANUAL_FLUSH: (Role.OPERATE,),
    }
    assert not any(BEHAVIOUR[kind] & (Flag.SYSTEM | Flag.SELF_CONTROLLED) for kind in below)
    assert all(MESSAGE_REQUIREMENTS[kind].scope is ResourceKind.VCHANNEL for kind in below)


@pytest.mark.parametrize(
    "role, on, name, allowed",
    [
        (Role.READ, "pchannel:dml_0", {"pchannel": "dml_0"}, True),
        (Role.READ, "pchannel:dml_1", {"pchannel": "dml_0"}, False),
        (Role.READ, "users", {"pchannel": "dml_0"}, False),
        (Role.READ, EVERYTHING, {"pchannel": "dml_0"}, True),
        (Role.PRODUCE, "pchannel:dml_0", {"pchannel": "dml_0"}, False),
    ],
)
def test_a_pattern_is_held_against_the_name_in_the_request(
    guarded: Guarded, request: pytest.FixtureRequest, role: Role, on: str, name: dict[str, Any], allowed: bool
) -> None:
    token = guarded.add(f"case-{next(_COUNT)}", Grant(role, (on,)))
    with guarded.link(token) as link:
        if allowed:
            assert link.act("describe", name, timeout=20)
        else:
            with pytest.raises(PermissionDenied):
                link.act("describe", name, timeout=20)


_COUNT = itertools.count()


def test_of_the_catalog_one_sees_what_one_has_a_role_on(guarded: Guarded, tokens: Mapping[str, str]) -> None:
    everything = [each.name for each in guarded.client.catalog.collections()]
    assert {"orders", "users"} <= set(everything)
    for token, seen in (("read", everything), ("narrow read", ["users"]), ("narrow produce", ["users"])):
        with guarded.link(tokens[token]) as link:
            found = link.act("append/catalog", {"call": "collections"}, timeout=20)["collections"]
            assert [each["name"] for each in found] == seen
    with guarded.link(tokens["narrow read"]) as link:
        users = {"call": "collection", "arguments": {"name": "users"}}
        assert link.act("append/catalog", users, timeout=20)["name"] == "users"
        for other in ("orders", NOT_THERE, "users/../orders", "users\0", "*"):
            with pytest.raises(PermissionDenied):
                link.act("append/catalog", {"call": "collection", "arguments": {"name": other}}, timeout=20)


def test_narrow_tokens_are_narrow() -> None:
    assert EVERYTHING not in NARROW
    assert not {NOT_THERE, "dml_0"} & {text.partition(":")[2] for text in NARROW}
