"""Message types: the ``MsgType`` numbers of chapter 4, extended by the streaming types, each with its flags.

The numbers of chapter 4 are unchanged; the streaming types use 1300 and up. :func:`require_behaviour` refuses a number
without behaviour (on the log it is recorded as a rejection); it is never ignored.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final, Literal, TypeAlias, get_args

from millrace.base.errors import UnsupportedMessageType

OnDuplicate: TypeAlias = Literal["keep", "replace"]
ON_DUPLICATE: Final[tuple[OnDuplicate, ...]] = get_args(OnDuplicate)
"""Effect of an insert on an existing row with its key, as in a collection's schema."""


class MessageType(IntEnum):
    """``MsgType`` of chapter 4 (0-1299) and the streaming types of Millrace (1300-1399)."""

    UNDEFINED = 0
    CREATE_COLLECTION = 100
    DROP_COLLECTION = 101
    HAS_COLLECTION = 102
    DESCRIBE_COLLECTION = 103
    SHOW_COLLECTIONS = 104
    GET_SYSTEM_CONFIGS = 105
    LOAD_COLLECTION = 106
    RELEASE_COLLECTION = 107
    CREATE_ALIAS = 108
    DROP_ALIAS = 109
    ALTER_ALIAS = 110
    CREATE_PARTITION = 200
    DROP_PARTITION = 201
    HAS_PARTITION = 202
    DESCRIBE_PARTITION = 203
    SHOW_PARTITIONS = 204
    LOAD_PARTITIONS = 205
    RELEASE_PARTITIONS = 206
    SHOW_SEGMENTS = 250
    DESCRIBE_SEGMENT = 251
    LOAD_SEGMENTS = 252
    RELEASE_SEGMENTS = 253
    HANDOFF_SEGMENTS = 254
    LOAD_BALANCE_SEGMENTS = 255
    CREATE_INDEX = 300
    DESCRIBE_INDEX = 301
    DROP_INDEX = 302
    INSERT = 400
    DELETE = 401
    FLUSH = 402
    UPSERT = 404
    SEARCH = 500
    SEARCH_RESULT = 501
    GET_INDEX_STATE = 502
    GET_INDEX_BUILD_PROGRESS = 503
    GET_COLLECTION_STATISTICS = 504
    GET_PARTITION_STATISTICS = 505
    RETRIEVE = 506
    RETRIEVE_RESULT = 507
    WATCH_DM_CHANNELS = 508
    REMOVE_DM_CHANNELS = 509
    WATCH_QUERY_CHANNELS = 510
    REMOVE_QUERY_CHANNELS = 511
    SEGMENT_INFO = 600
    TIME_TICK = 1200
    QUERY_NODE_STATS = 1201
    LOAD_INDEX = 1202
    REQUEST_ID = 1203
    REQUEST_TSO = 1204
    ALLOCATE_SEGMENT = 1205
    SEGMENT_STATISTICS = 1206
    SEGMENT_FLUSH_DONE = 1207
    DATA_NODE_TT = 1208
    TERM_OPENING = 1300
    CONFIG = 1301
    CREATE_SEGMENT = 1302
    MANUAL_FLUSH = 1303
    FLUSH_ALL = 1304
    BEGIN_TXN = 1305
    COMMIT_TXN = 1306
    ROLLBACK_TXN = 1307
    KEEP_ALIVE = 1308
    SCHEMA_CHANGE = 1309
    IMPORT = 1310
    ALTER_WAL = 1311


class Flag(IntFlag):
    """The chain's behaviour for a type. A type that is not in :data:`BEHAVIOUR` has no behaviour."""

    NONE = 0
    SYSTEM = 1
    """Written by Millrace itself; the client library refuses it."""
    EXCLUSIVE = 2
    """A barrier on its VChannel (with an empty VChannel, on the whole PChannel); fails the transactions open there."""
    SELF_CONTROLLED = 4
    """Controls the WAL itself, not a collection's content."""
    DML = 8
    """Changes rows; may be part of a transaction."""
    EMITTED = 16
    """The chain may emit it; it is rejected if it comes from the log."""


BEHAVIOUR: Final[dict[MessageType, Flag]] = {
    MessageType.INSERT: Flag.DML,
    MessageType.DELETE: Flag.DML,
    MessageType.UPSERT: Flag.DML,
    MessageType.CREATE_COLLECTION: Flag.EXCLUSIVE,
    MessageType.DROP_COLLECTION: Flag.EXCLUSIVE,
    MessageType.CREATE_PARTITION: Flag.EXCLUSIVE,
    MessageType.DROP_PARTITION: Flag.EXCLUSIVE,
    MessageType.SCHEMA_CHANGE: Flag.EXCLUSIVE,
    MessageType.MANUAL_FLUSH: Flag.EXCLUSIVE,
    MessageType.FLUSH_ALL: Flag.EXCLUSIVE | Flag.SELF_CONTROLLED,
    MessageType.BEGIN_TXN: Flag.NONE,
    MessageType.COMMIT_TXN: Flag.NONE,
    MessageType.ROLLBACK_TXN: Flag.NONE,
    MessageType.KEEP_ALIVE: Flag.NONE,
    MessageType.TIME_TICK: Flag.SYSTEM | Flag.SELF_CONTROLLED,
    MessageType.TERM_OPENING: Flag.SYSTEM | Flag.SELF_CONTROLLED,
    MessageType.CONFIG: Flag.SYSTEM | Flag.SELF_CONTROLLED,
    MessageType.CREATE_SEGMENT: Flag.SYSTEM | Flag.EMITTED,
    MessageType.FLUSH: Flag.SYSTEM | Flag.EMITTED,
    MessageType.ALTER_WAL: Flag.SYSTEM | Flag.SELF_CONTROLLED,
    MessageType.IMPORT: Flag.EXCLUSIVE,
}
"""The types that the chain implements, with their flags. The others are numbers only."""

DML: Final = tuple(member for member, flags in BEHAVIOUR.items() if Flag.DML in flags)
"""Types that change rows."""

ROW_CARRYING_TYPES: Final = (MessageType.INSERT, MessageType.UPSERT)
"""DML types whose payload is whole rows; the others carry keys."""

KEY_DELETING_TYPES: Final = (MessageType.DELETE, MessageType.UPSERT)
"""DML types that delete older rows by key."""

MIN_CHAIN_VERSION: Final[dict[MessageType, int]] = {
    MessageType.ALTER_WAL: 2,
    MessageType.IMPORT: 3,
    MessageType.UPSERT: 4,
}
"""The chain version that introduced a type; 1 for the others."""


def require_behaviour(number: int) -> MessageType:
    """Return the type of `number`. Raises UnsupportedMessageType if it has no behaviour."""
    message_type = _BY_NUMBER.get(number)
    if message_type is None:
        raise UnsupportedMessageType(f"{number} is no message type")
    if message_type not in BEHAVIOUR:
        raise UnsupportedMessageType(f"{message_type.name} ({number}) has no behaviour in this version of Millrace")
    return message_type


_BY_NUMBER: Final[dict[int, MessageType]] = {member.value: member for member in MessageType}


def flags_of(number: int) -> Flag | None:
    """Return the flags of a type number; None if it is unknown or has no behaviour."""
    member = _BY_NUMBER.get(number)
    return None if member is None else BEHAVIOUR.get(member)
