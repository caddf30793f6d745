"""What a limited token puts into an append.

Every message of every entry counts, and one that may not be keeps all of it out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from pyarrow import flight

from millrace.access.grants import LOCAL_ADMIN, Caller, Grant, Principal, Role
from millrace.access.permissions import MESSAGE_REQUIREMENTS
from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, Malformed, PermissionDenied, UnsupportedVersion
from millrace.log.rocksmq.service import RocksMQ
from millrace.message import builders
from millrace.message.columns import MessageColumns
from millrace.message.keys import vchannel_index
from millrace.message.log_entries import ENTRY_SCHEMA
from millrace.message.model import MutableMessage
from millrace.message.types import BEHAVIOUR, MessageType
from millrace.message.wire.decode import decode_columns, decode_header_summary
from millrace.message.wire.encode import encode_entry
from millrace.message.wire.layout import MAX_MESSAGES
from millrace.message.wire.stamp import stamp_entries
from millrace.node.append.authorizer import AppendAuthorizer
from millrace.node.append.host import AppendHost
from millrace.node.append.server import AppendExtension
from millrace.observe.log_probe import host_metrics
from millrace.rpc.link import ExchangeStream
from millrace.rpc.outcome import AppendOutcome
from millrace.rpc.wire import TIMEOUT, ack_from_bytes, to_json
from millrace.wal.state import ChannelState
from tests.access.conftest import MACHINE_TOKEN, SCHEMA, Guarded
from tests.message.samples import runs
from tests.message.wire.test_hostile import entry, sealed
from tests.rpc.tampering import HOSTILE, tampered

USERS, ORDERS = "dml_0_1v0", "dml_0_2v0"
NAMES = {USERS: "users", ORDERS: "orders"}


def door(*grants: Grant) -> AppendAuthorizer:
    return AppendAuthorizer(Caller(Principal("somebody", grants)), NAMES.get)


def array(*entries: bytes) -> pa.LargeBinaryArray:
    return pa.array(entries, pa.large_binary())


def of(kind: MessageType, vchannel: str = USERS) -> MutableMessage:
    return MutableMessage(type=kind, vchannel=vchannel, collection_id=1, payload=b"x")


def insert(key: int, vchannel: str = USERS, collection_id: int = 1) -> MutableMessage:
    return builders.insert(
        pa.record_batch([pa.array([key]), pa.array(["body"])], schema=SCHEMA.arrow()),
        vchannel=vchannel,
        collection_id=collection_id,
        partition_id=1,
        term=1,
    )


PRODUCING = Principal("somebody", (Grant(Role.PRODUCE, ("users",)),))
PRODUCER = AppendAuthorizer(Caller(PRODUCING), NAMES.get)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("kind", BEHAVIOUR)
def test_a_type_of_message_is_let_in_for_the_roles_that_the_table_names(kind: MessageType, role: Role) -> None:
    own = door(Grant(role))
    if set(MESSAGE_REQUIREMENTS[kind].roles) & role.implied_roles:
        own.authorize(array(encode_entry([of(kind)])))
    else:
        with pytest.raises(PermissionDenied):
            own.authorize(array(encode_entry([of(kind)])))


@pytest.mark.parametrize("kind", [kind for kind, need in MESSAGE_REQUIREMENTS.items() if need.roles != (Role.PRODUCE,)])
@pytest.mark.parametrize("vchannel", [USERS, ""])
def test_one_message_of_another_type_among_many_keeps_all_out(kind: MessageType, vchannel: str) -> None:
    many = [insert(key) for key in range(50)]
    for place in (0, 25, 50):
        mixed = [*many[:place], of(kind, vchannel), *many[place:]]
        with pytest.raises(PermissionDenied):
            PRODUCER.authorize(array(encode_entry(mixed)))
        with pytest.raises(PermissionDenied):
            PRODUCER.authorize(array(encode_entry(many), encode_entry(mixed), encode_entry(many)))


@pytest.mark.parametrize(
    "vchannel", [ORDERS, "dml_0_9v9", "", "users", "dml_0_1v0 ", "dml_0_1v00", "../dml_0_1v0", "*"]
)
def test_one_message_of_a_foreign_vchannel_among_many_keeps_all_out(vchannel: str) -> None:
    mixed = [*(insert(key) for key in range(50)), insert(1, vchannel), *(insert(key) for key in range(50))]
    with pytest.raises(PermissionDenied, match="needs"):
        PRODUCER.authorize(array(encode_entry(mixed)))
    PRODUCER.authorize(array(encode_entry([each for each in mixed if each.vchannel == USERS])))


def test_a_token_that_is_no_more_lets_nothing_in_on_a_stream_that_is_open() -> None:
    live = [True]
    for caller in (PRODUCING, Principal.admin("boss")):
        own = AppendAuthorizer(Caller(caller, is_valid=lambda: live[0]), NAMES.get)
        live[0] = True
        own.authorize(array(encode_entry([insert(1)])))
        live[0] = False
        with pytest.raises(PermissionDenied, match="revoked"):
            own.authorize(array(encode_entry([insert(1)])))


def test_a_number_that_is_no_type_is_let_in_for_nobody_but_an_admin() -> None:
    for columns in ({"type": (1, struct.pack("<H", 777))}, {"type": (1, struct.pack("<H", 0))}):
        for role in (Role.READ, Role.PRODUCE, Role.OPERATE):
            with pytest.raises(PermissionDenied):
                door(Grant(role)).authorize(array(entry(columns=columns)))
        AppendAuthorizer(LOCAL_ADMIN, NAMES.get).authorize(array(entry(columns=columns)))


def test_types_in_every_form_of_a_column_are_seen() -> None:
    own = b"\x01\x00" + struct.pack("<H", len(USERS)) + USERS.encode()
    insert_, ddl = int(MessageType.INSERT), int(MessageType.CREATE_COLLECTION)
    pad = b"x" * 64
    ramp = entry(count=2, columns={"type": (3, struct.pack("<H", insert_))}, dictionary=own, body=pad)
    whole = entry(count=2, columns={"type": (2, struct.pack("<HH", insert_, ddl))}, dictionary=own, body=pad)
    with pytest.raises(PermissionDenied):
        PRODUCER.authorize(array(whole))
    PRODUCER.authorize(array(ramp))  # 400, 401: an insert and a delete
    further = entry(count=3, columns={"type": (3, struct.pack("<H", insert_))}, dictionary=own, body=pad)
    with pytest.raises(PermissionDenied):
        PRODUCER.authorize(array(further))


def test_names_beyond_the_first_are_seen() -> None:
    two = b"\x02\x00" + b"".join(struct.pack("<H", len(name)) + name.encode() for name in (USERS, ORDERS))
    kind = {"type": (1, struct.pack("<H", int(MessageType.INSERT)))}
    for column in ((3, struct.pack("<H", 0)), (2, struct.pack("<HH", 0, 1)), (1, struct.pack("<H", 1))):
        with pytest.raises(PermissionDenied):
            PRODUCER.authorize(
                array(entry(count=2, columns={**kind, "vchannel": column}, dictionary=two, body=b"x" * 64))
            )
    outside = entry(count=1, columns={**kind, "vchannel": (1, struct.pack("<H", 2))}, dictionary=two)
    with pytest.raises(Malformed, match="outside"):
        PRODUCER.authorize(array(outside))


def test_an_entry_that_is_not_right_is_refused_and_one_of_a_later_version_too() -> None:
    good = encode_entry([insert(1)])
    with pytest.raises(Malformed, match="checksum"):
        PRODUCER.authorize(array(good, good[:-1] + bytes([good[-1] ^ 1])))
    with pytest.raises(UnsupportedVersion):
        PRODUCER.authorize(array(entry(version=3)))


@given(st.lists(runs().filter(bool).map(encode_entry), min_size=1, max_size=4))
def test_heads_are_what_decoding_finds(entries_: Sequence[bytes]) -> None:
    heads, columns = decode_header_summary(array(*entries_)), decoded(entries_)
    assert not isinstance(heads, str)
    assert heads.types.tolist() == columns.type.tolist()
    assert [heads.names[name] for name in heads.vchannels] == [
        columns.vchannel_name(row) for row in range(len(columns))
    ]


@given(st.lists(runs().filter(bool).map(encode_entry), min_size=1, max_size=4), st.data())
def test_what_decodes_with_a_changed_byte_has_the_heads_that_were_looked_at(
    entries_: Sequence[bytes], data: st.DataObject
) -> None:
    """Sealed again, so that the checksum holds.

    Whatever an attacker writes is one thing at the door and in the chain.
    """
    values = list(entries_)
    place = data.draw(st.integers(0, len(values) - 1))
    value = bytearray(values[place])
    value[data.draw(st.integers(12, len(value) - 1))] = data.draw(st.integers(0, 255))
    values[place] = sealed(bytes(value))
    heads, columns = decode_header_summary(array(*values)), decoded(values)
    if columns.details:
        return  # UNDEFINED to the chain, whatever the door said
    assert not isinstance(heads, str)
    assert heads.types.tolist() == columns.type.tolist()
    assert [heads.names[name] for name in heads.vchannels] == [
        columns.vchannel_name(row) for row in range(len(columns))
    ]


def decoded(values: Sequence[bytes]) -> MessageColumns:
    rows = [{"ledger": 0, "entry": place, "physical_ms": 1, "value": value} for place, value in enumerate(values)]
    return decode_columns(pa.RecordBatch.from_pylist(rows, schema=ENTRY_SCHEMA))


def test_entries_without_number_are_looked_at_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    from millrace.node.append import authorizer as entry_door

    seen: list[int] = []

    def counting(values: pa.LargeBinaryArray) -> object:
        heads = decode_header_summary(values)
        assert not isinstance(heads, str)
        seen.append(len(heads.types))
        return heads

    monkeypatch.setattr(entry_door, "decode_header_summary", counting)
    keep = encode_entry([of(MessageType.KEEP_ALIVE)] * 1000)
    PRODUCER.authorize(array(*[keep] * 200))
    assert sum(seen) == 200_000
    assert max(seen) <= MAX_MESSAGES


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_batch_whose_offsets_lead_elsewhere_is_refused_before_anything_of_it_is_read(
    tmp_path: Path, how: str, pipelined: bool
) -> None:
    chunks = [SimpleNamespace(data=tampered([b"right", b"right"], HOSTILE[how]), app_metadata=None)]
    written: list[bytes] = []
    reader = SimpleNamespace(read_chunk=lambda: chunks.pop() if chunks else next(iter(())))
    writer = SimpleNamespace(begin=lambda schema: None, write_metadata=lambda data: written.append(data.to_pybytes()))
    with RocksMQ(tmp_path) as service:
        service.create("dml_0")
        host = AppendHost(service, ChannelState.new)
        command = flight.FlightDescriptor.for_command(to_json({"pchannel": "dml_0", "pipelined": pipelined}))
        AppendExtension(host).do_exchange(command, reader, writer, Caller(PRODUCING))
        assert service.open("dml_0").end() == service.open("dml_0").describe().begin
        host.close()
    with pytest.raises(InvalidArgument, match="at least one entry"):
        ack_from_bytes(written[0])


# --- over the wire ----------------------------------------------------------------------------------------------------


class Appending:
    """A stream of appends with a token."""

    def __init__(self, stream: ExchangeStream) -> None:
        self._stream = stream

    def send(self, *entries: bytes) -> None:
        self._stream.request(array(*entries), TIMEOUT.pack(20.0), deadline=Deadline.after(30))

    def answer(self) -> AppendOutcome:
        chunk = self._stream.answer(deadline=Deadline.after(30))
        if chunk.data is not None:
            return AppendOutcome(chunk.data)
        ack_from_bytes(chunk.app_metadata.to_pybytes())
        raise AssertionError("an answer with nothing")


@pytest.fixture(params=[False, True], ids=["plain", "pipelined"])
def appending(request: pytest.FixtureRequest, guarded: Guarded, tokens: Mapping[str, str]) -> Iterator[Appending]:
    with guarded.link(tokens["narrow produce"]) as link:
        stream = ExchangeStream(link, {"extension": "append", "pchannel": "dml_0", "pipelined": request.param})
        yield Appending(stream)
        stream.close()


def test_refused_appends_leave_nothing_in_the_log_and_their_neighbours_stand(
    appending: Appending, guarded: Guarded
) -> None:
    log = guarded.client.log.open("dml_0")
    before = log.end()
    partition = next(iter(guarded.client.definition("users").partitions.values()))
    key = next(key for key in range(100) if vchannel_index(pa.array([key]), 2)[0] == 0)
    good = encode_entry([replace(insert(key), partition_id=partition)])
    ddl = encode_entry([of(MessageType.DROP_COLLECTION)])
    foreign = encode_entry([insert(1), insert(2, ORDERS, 2)])
    for entries in ((good,), (ddl,), (good,), (good, foreign), (good, good)):
        appending.send(*entries)
    assert appending.answer().results()[0].time_tick
    with pytest.raises(PermissionDenied):
        appending.answer()
    assert appending.answer().results()
    with pytest.raises(PermissionDenied):
        appending.answer()
    assert len(appending.answer().results()) == 2
    # Entries are in the log with the stamp of their token.
    written = stamp_entries(log.read(before, max_bytes=64 << 20).batch["value"], "").to_pylist()
    assert written.count(good) == 4
    assert ddl not in written
    assert foreign not in written
    assert guarded.client.definition("users").state == "active"


def test_what_is_denied_is_counted_by_call(guarded: Guarded, tokens: Mapping[str, str]) -> None:
    def denied(call: str) -> float:
        families = text_string_to_metric_families(host_metrics(guarded.client.connection))
        samples = [each for family in families for each in family.samples]
        name = "millrace_log_denied_calls_total"
        return sum(each.value for each in samples if each.name == name and each.labels == {"call": call})

    before = {call: denied(call) for call in ("drop", "append/do_exchange", "append/catalog")}
    with guarded.link(tokens["narrow produce"]) as link:
        for _ in range(3):
            with pytest.raises(PermissionDenied):
                link.act("drop", {"pchannel": "dml_0"}, timeout=20)
        drop = {"call": "drop_collection", "arguments": {"name": "users"}}
        with pytest.raises(PermissionDenied):
            link.act("append/catalog", drop, timeout=20)
        stream = ExchangeStream(link, {"extension": "append", "pchannel": "dml_0"})
        own = Appending(stream)
        own.send(encode_entry([of(MessageType.FLUSH_ALL)]))
        with pytest.raises(PermissionDenied):
            own.answer()
        stream.close()
    assert {call: denied(call) - known for call, known in before.items()} == {
        "drop": 3.0,
        "append/do_exchange": 1.0,
        "append/catalog": 1.0,
    }


def test_the_machines_own_token_may_append_anything(guarded: Guarded) -> None:
    with guarded.link(MACHINE_TOKEN) as link:
        stream = ExchangeStream(link, {"extension": "append", "pchannel": "dml_0"})
        own = Appending(stream)
        own.send(encode_entry([builders.flush_all(term=1)]))
        assert own.answer().results()[0].time_tick
        stream.close()
