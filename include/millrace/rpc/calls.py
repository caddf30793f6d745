"""The registry of all calls of the log's server: its own, its append host's, and the coordinator's.

An entry names the call, the keys of its request and answer, the role it needs, and whether a client may repeat it.
Client, dispatch, permissions, their tests and the table in docs/access.md all use these entries. To add a call, add an
entry and a handler: a method (or function) with the decorator :func:`handles`. A server refuses to start if an entry
has no role or no handler. A call without an entry is refused to everybody.

Calls are named as they cross the wire: an action by its type, a stream by its Flight method, prefixed with the name of
its extension, a call of the coordinator with :data:`CATALOG_PREFIX`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, Final, TypeVar

from millrace.access.grants import ResourceKind, Role
from millrace.access.permissions import ANY_ROLE, Requirement, Scope
from millrace.base.errors import InvalidArgument

CATALOG_PREFIX: Final = "append/catalog/"
"""The prefix of the coordinator's calls."""


class Repeat(Enum):
    """Whether a client repeats a call whose answer was lost, and why that is safe."""

    READS = "it only reads"
    IDEMPOTENT = "a second call changes nothing more"
    REQUEST_ID = "its request has an id, under which it takes effect once"
    NEVER = "no: the caller learns that the effect is unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCall(Requirement):
    """A call of the log's server, with the role that it requires."""

    name: str
    ticket: str = ""
    """The key that tells the reads of one extension apart; its value names what to read."""
    request: tuple[str, ...] = ()
    """Keys of the request, a JSON object. Those with a question mark are optional."""
    answer: tuple[str, ...] = ()
    """Keys of the answer, a JSON object; of a read, those of its last metadata."""
    repeat: Repeat = Repeat.READS

    def __post_init__(self) -> None:
        if not self.roles:
            raise InvalidArgument(f"the call {self.key!r} has no role: name at least one that may make it")

    @property
    def key(self) -> str:
        """The unique name in :data:`SERVER_CALLS`."""
        return f"{self.name}:{self.ticket}" if self.ticket else self.name

    def checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return an answer of the call, which has no other keys than the entry."""
        assert answer.keys() <= set(self.answer), f"{self.key} answers {sorted(answer.keys() - set(self.answer))}, too"
        return answer

    @property
    def is_stream(self) -> bool:
        """Whether it is a Flight stream (DoGet, DoExchange) and not an action."""
        return self.name.rpartition("/")[2] in ("do_get", "do_exchange")

    @property
    def arguments(self) -> frozenset[str]:
        """The keys that a request may have."""
        return frozenset(each.rstrip("?") for each in (*self.request, *((self.ticket,) if self.ticket else ())))


SERVER_CALLS: Final[dict[str, ServerCall]] = {}
"""Every call, by key."""

_ARGUMENTS: Final = {ResourceKind.COLLECTION: "name"}
"""The key of a request that has the resource's name, unless it is the kind itself."""


def _call(
    name: str,
    roles: tuple[Role, ...] | Role,
    scope: ResourceKind | Scope,
    description: str,
    *,
    ticket: str = "",
    argument: str = "",
    request: str = "",
    answer: str = "",
    repeat: Repeat = Repeat.READS,
) -> ServerCall:
    """Add an entry. The keys of `request` and `answer` are separated by blanks."""
    if isinstance(scope, ResourceKind) and not argument:
        argument = _ARGUMENTS.get(scope, str(scope))
    made = ServerCall(
        roles=(roles,) if isinstance(roles, Role) else roles,
        scope=scope,
        argument=argument,
        description=description,
        name=name,
        ticket=ticket,
        request=tuple(request.split()),
        answer=tuple(answer.split()),
        repeat=repeat,
    )
    if made.key in SERVER_CALLS:
        raise InvalidArgument(f"the call {made.key!r} has two entries: give each call one name")
    SERVER_CALLS[made.key] = made
    return made


_CLOCK: Final = "wall_ms stamp_ms held_since_ms leap_seconds"

# --- the log ------------------------------------------------------------------------------------------------------

PING: Final = _call("ping", ANY_ROLE, Scope.ANYTHING, "check that the server is alive", answer="pid stopping")
NAMES: Final = _call("names", ANY_ROLE, Scope.ANYTHING, "list the PChannels' names", answer="names")
OPEN: Final = _call("open", ANY_ROLE, Scope.ANYTHING, "check that a PChannel exists", request="pchannel")
READ_LOG: Final = _call(
    "do_get",
    Role.READ,
    ResourceKind.PCHANNEL,
    "read the log itself, with all VChannels",
    request="pchannel position end? max_bytes? timeout?",
    answer="next busy",
)
DESCRIBE: Final = _call(
    "describe",
    Role.READ,
    ResourceKind.PCHANNEL,
    "show the begin, end and bytes of a log",
    request="pchannel",
    answer="begin end bytes",
)
FLOOR: Final = _call(
    "floor",
    Role.READ,
    ResourceKind.PCHANNEL,
    "show the end of a log, and what it promises about later timestamps",
    request="pchannel",
    answer="end ms",
)
ENDS: Final = _call("ends", Role.READ, Scope.EVERYTHING, "show the ends of logs", request="pchannels", answer="ends")
GROUPS: Final = _call("groups", Role.READ, Scope.EVERYTHING, "list the log's consumer groups", answer="groups")
GROUP_POSITION: Final = _call(
    "group_position",
    Role.READ,
    ResourceKind.GROUP,
    "show a group's position",
    request="group pchannel",
    answer="position",
)
MOVE_GROUP: Final = _call(
    "move_group",
    Role.READ,
    ResourceKind.GROUP,
    "move a group",
    request="group pchannel position",
    repeat=Repeat.IDEMPOTENT,
)
HOLD_GROUP: Final = _call(
    "hold_group",
    Role.READ,
    ResourceKind.GROUP,
    "hold a group's channel for one consumer",
    request="group pchannel holder seconds",
    repeat=Repeat.IDEMPOTENT,
)
CLOCK: Final = _call("clock", Role.READ, Scope.EVERYTHING, "show the clock of the log's timestamps", answer=_CLOCK)
VERIFY: Final = _call(
    "verify",
    Role.OPERATE,
    ResourceKind.PCHANNEL,
    "verify a log against its checksums",
    request="pchannel",
    answer="records entries bytes first_bad detail",
)
APPEND_TO_LOG: Final = _call(
    "do_exchange",
    Role.ADMIN,
    ResourceKind.PCHANNEL,
    "append to the log without the checks of appends",
    argument="append",
    request="append pipelined?",
    repeat=Repeat.NEVER,
)
CREATE: Final = _call(
    "create", Role.ADMIN, ResourceKind.PCHANNEL, "create a log", request="pchannel", repeat=Repeat.NEVER
)
DROP: Final = _call("drop", Role.ADMIN, ResourceKind.PCHANNEL, "drop a log", request="pchannel", repeat=Repeat.NEVER)
TRUNCATE: Final = _call(
    "truncate",
    Role.ADMIN,
    ResourceKind.PCHANNEL,
    "truncate a log's beginning",
    request="pchannel position",
    answer="freed",
    repeat=Repeat.IDEMPOTENT,
)
RETAIN: Final = _call(
    "retain",
    Role.ADMIN,
    ResourceKind.PCHANNEL,
    "remove what retention allows",
    request="pchannel allowed",
    answer="freed",
    repeat=Repeat.IDEMPOTENT,
)
DROP_GROUP: Final = _call(
    "drop_group",
    Role.ADMIN,
    ResourceKind.GROUP,
    "drop a group and its positions",
    request="group",
    repeat=Repeat.IDEMPOTENT,
)
ACCEPT_CLOCK: Final = _call(
    "accept_clock",
    Role.ADMIN,
    Scope.EVERYTHING,
    "accept the wall clock, however far it jumped",
    answer=_CLOCK,
    repeat=Repeat.IDEMPOTENT,
)
SHUTDOWN: Final = _call("shutdown", Role.ADMIN, Scope.EVERYTHING, "stop the server", repeat=Repeat.NEVER)

# --- the append host ----------------------------------------------------------------------------------------------

APPEND: Final = _call(
    "append/do_exchange",
    Role.PRODUCE,
    Scope.ANYTHING,
    "append messages; each needs a role of its own, see below",
    request="pchannel? pipelined? bundles? principal?",
    repeat=Repeat.NEVER,
)
TAIL: Final = _call(
    "append/do_get",
    Role.READ,
    Scope.ANYTHING,
    "read new messages, of VChannels with that role",
    ticket="tail",
    request="after? timeout? max_bytes? principals?",
    answer="confirmed evicted",
)
DECIDED: Final = _call(
    "append/do_get",
    Role.READ,
    Scope.ANYTHING,
    "read new messages of several PChannels for a read of a collection, of VChannels with that role",
    ticket="decided",
    request="collection_id at? max_bytes? deadline?",
    answer="ticks complete",
)
READ_COLLECTION: Final = _call(
    "append/do_get",
    Role.READ,
    Scope.ANYTHING,
    "read or count the rows of a collection with that role, or read those of primary keys, or their changes",
    ticket="read",
    request="at? deadline? columns? where? limit? order_by? count? keys? changes? after?",
    answer="rows selected counted keyed changes",
)
READ_WAL: Final = _call(
    "append/do_get",
    Role.READ,
    Scope.ANYTHING,
    "read messages of the `wal` table, of VChannels with that role",
    ticket="history",
    request="start? after? up_to? max_bytes? columns? vchannels? principals?",
    answer="next",
)
READ_IMPORT: Final = _call(
    "append/do_get",
    Role.READ,
    Scope.ANYTHING,
    "read the rows of an import into a collection with that role",
    ticket="imported",
    request="at skip?",
    answer="rows",
)
DESCRIBE_WAL: Final = _call(
    "append/history",
    Role.READ,
    Scope.ANYTHING,
    "show the range of a PChannel in the `wal` table",
    request="pchannel confirmed_at?",
    answer="version last_tick trimmed confirmed",
)
DESCRIBE_CHECKPOINT: Final = _call(
    "append/checkpointed",
    Role.READ,
    Scope.ANYTHING,
    "show where the changes of a collection with that role begin",
    request="pchannel collection_id",
    answer="time_tick vchannels",
)
GROUP: Final = _call(
    "append/group",
    Role.READ,
    ResourceKind.GROUP,
    "be a member of a consumer group, hold its lanes, and move the group there",
    request="group holder take? move? strict? later? keep? leave? member? sync?",
    answer="tick lease start held share members reason done",
    repeat=Repeat.IDEMPOTENT,
)
GROUP_HEARTBEATS: Final = _call(
    "append/group_heartbeats",
    Role.READ,
    Scope.ANYTHING,
    "be a member of several consumer groups with that role: an `append/group` with `sync` for each",
    request="members",
    answer="answers",
    repeat=Repeat.IDEMPOTENT,
)
TAKE_TASKS: Final = _call(
    "append/do_get",
    Role.READ,
    ResourceKind.GROUP,
    "lease tasks of a work queue, the rows of a collection with that role",
    ticket="queue",
    request="group consumer lanes client? most? lease? wait? last? order? start? session?",
    answer="number lanes reason session",
    repeat=Repeat.IDEMPOTENT,
)
SETTLE_TASKS: Final = _call(
    "append/queue",
    Role.READ,
    ResourceKind.GROUP,
    "acknowledge, renew and release tasks of a work queue, and leave it",
    request="group consumer done? renew? release? lease? leave? last?",
    answer="lost unread",
    repeat=Repeat.IDEMPOTENT,
)
TASK_NEWS: Final = _call(
    "append/queue_news",
    Role.READ,
    Scope.ANYTHING,
    "wait for tasks of all consumers that the caller has waiting in a session",
    request="session last? wait? end?",
    answer="number session ready",
    repeat=Repeat.IDEMPOTENT,
)
DROP_CONSUMER_GROUP: Final = _call(
    "append/drop_group",
    Role.ADMIN,
    ResourceKind.GROUP,
    "drop a consumer group and its positions",
    request="group",
    repeat=Repeat.IDEMPOTENT,
)
RESET_CONSUMER_GROUP: Final = _call(
    "append/reset_group",
    Role.ADMIN,
    ResourceKind.GROUP,
    "move a consumer group's positions",
    request="group ticks",
    answer="before",
    repeat=Repeat.IDEMPOTENT,
)
CONSUMER_GROUPS: Final = _call(
    "append/groups",
    Role.READ,
    Scope.EVERYTHING,
    "list consumer groups with their members and positions",
    answer="groups",
)
ASSIGNMENTS: Final = _call(
    "append/assignments",
    ANY_ROLE,
    Scope.ANYTHING,
    "show which nodes serve the appends of which PChannels",
    request="after?",
    answer="version whole assignments token",
)
TICK: Final = _call(
    "append/tick",
    ANY_ROLE,
    Scope.ANYTHING,
    "append a time tick",
    request="pchannel deadline? persist? forwarded? tick? source_id?",
    answer="tick last_confirmed id persisted term",
    repeat=Repeat.IDEMPOTENT,
)
CONFIRM: Final = _call(
    "append/confirm",
    ANY_ROLE,
    Scope.ANYTHING,
    "wait until a tick is decided",
    request="pchannel tick deadline?",
    answer="tick",
    repeat=Repeat.IDEMPOTENT,
)
MVCC: Final = _call(
    "append/mvcc",
    Role.READ,
    Scope.ANYTHING,
    "show how far VChannels with that role can be read",
    request="vchannel",
    answer="vchannel time_tick confirmed unconfirmed updates",
)
FLOW: Final = _call(
    "append/flow",
    ANY_ROLE,
    Scope.ANYTHING,
    "show the state of flow control",
    answer="mode rate why readings levels delayed refused",
)
DESCRIBE_HOST: Final = _call(
    "append/describe",
    Role.READ,
    ResourceKind.PCHANNEL,
    "show the append host's position",
    request="pchannel",
    answer="position last_entry last_tick term chain_version parked news_end open",
)
DESCRIBE_HOSTS: Final = _call(
    "append/describe_all",
    Role.READ,
    Scope.EVERYTHING,
    "show the append host's position and the log of every PChannel",
    answer="channels",
)
DEFINITIONS: Final = _call(
    "append/definitions",
    Role.OPERATE,
    ResourceKind.PCHANNEL,
    "show the chain's definitions of collections",
    request="pchannel collection_id? deadline?",
    answer="taken max_vchannels max_partitions collections vchannels outlines",
)
RESTART: Final = _call(
    "append/restart",
    Role.OPERATE,
    ResourceKind.PCHANNEL,
    "restart a PChannel after the cause of its parking is fixed",
    request="pchannel",
    repeat=Repeat.IDEMPOTENT,
)
TOMBSTONE: Final = _call(
    "append/tombstone",
    Role.ADMIN,
    ResourceKind.PCHANNEL,
    "inspect an entry that parks its PChannel, and replace it",
    request="pchannel entry sha256? author? reason?",
    answer="entry bytes sha256 physical_ms judged committed author reason at placed",
    repeat=Repeat.IDEMPOTENT,
)
METRICS: Final = _call("append/metrics", Role.READ, Scope.EVERYTHING, "read the server's metrics, as text")
CATALOG: Final = _call(
    "append/catalog",
    ANY_ROLE,
    Scope.ANYTHING,
    "a call of the coordinator: see the next rows",
    request="call arguments?",
    repeat=Repeat.NEVER,
)

# --- the coordinator ----------------------------------------------------------------------------------------------

_DEFINITION: Final = "id name state vchannels schemas partitions next_partition"

TERM: Final = _call(
    CATALOG_PREFIX + "term",
    ANY_ROLE,
    Scope.ANYTHING,
    "show the newest term of a PChannel",
    request="pchannel",
    answer="term",
)
PCHANNELS: Final = _call(
    CATALOG_PREFIX + "pchannels", ANY_ROLE, Scope.ANYTHING, "list the PChannels and their terms", answer="pchannels"
)
NEXT_EPOCH: Final = _call(
    CATALOG_PREFIX + "next_epoch",
    Role.PRODUCE,
    Scope.ANYTHING,
    "get a new epoch for a producer's id",
    request="producer_id held? request?",
    answer="epoch",
    repeat=Repeat.REQUEST_ID,
)
COLLECTION: Final = _call(
    CATALOG_PREFIX + "collection",
    ANY_ROLE,
    ResourceKind.COLLECTION,
    "show a collection's definition",
    request="name",
    answer=_DEFINITION,
)
COLLECTIONS: Final = _call(
    CATALOG_PREFIX + "collections",
    ANY_ROLE,
    Scope.ANYTHING,
    "list the definitions of collections with any role",
    request="dropped? search? after? limit? ids?",
    answer="collections next",
)
CREATE_COLLECTION: Final = _call(
    CATALOG_PREFIX + "create_collection",
    Role.OPERATE,
    ResourceKind.COLLECTION,
    "create a collection",
    request="name schema vchannels partitions exist_ok? restored? request?",
    answer=_DEFINITION,
    repeat=Repeat.REQUEST_ID,
)
CREATE_PARTITION: Final = _call(
    CATALOG_PREFIX + "create_partition",
    Role.OPERATE,
    ResourceKind.COLLECTION,
    "add a partition",
    request="name partition restored? request?",
    answer="id collection",
    repeat=Repeat.REQUEST_ID,
)
ADD_FIELD: Final = _call(
    CATALOG_PREFIX + "add_field",
    Role.OPERATE,
    ResourceKind.COLLECTION,
    "add a field",
    request="name field",
    answer="version collection",
    repeat=Repeat.NEVER,
)
ALTER: Final = _call(
    CATALOG_PREFIX + "alter",
    Role.OPERATE,
    ResourceKind.COLLECTION,
    "change the schema",
    request="name changes request?",
    answer="version collection",
    repeat=Repeat.REQUEST_ID,
)
FLUSH: Final = _call(
    CATALOG_PREFIX + "flush",
    Role.OPERATE,
    ResourceKind.COLLECTION,
    "seal and flush the growing segments",
    request="name request?",
    answer="ticks",
    repeat=Repeat.REQUEST_ID,
)
BROADCAST: Final = _call(
    CATALOG_PREFIX + "broadcast",
    Role.OPERATE,
    Scope.ANYTHING,
    "send one message to each of several VChannels, of collections with that role",
    request="messages kind? data? request?",
    answer="id ticks",
    repeat=Repeat.REQUEST_ID,
)
ENSURE_PCHANNELS: Final = _call(
    CATALOG_PREFIX + "ensure_pchannels",
    Role.OPERATE,
    Scope.EVERYTHING,
    "add PChannels",
    request="count",
    answer="pchannels",
    repeat=Repeat.IDEMPOTENT,
)
OPEN_TERM: Final = _call(
    CATALOG_PREFIX + "open_term",
    Role.OPERATE,
    ResourceKind.PCHANNEL,
    "open a PChannel's next term, with another config",
    request="pchannel config? request?",
    answer="term",
    repeat=Repeat.REQUEST_ID,
)
DROP_COLLECTION: Final = _call(
    CATALOG_PREFIX + "drop_collection",
    Role.ADMIN,
    ResourceKind.COLLECTION,
    "drop a collection with its rows",
    request="name request?",
    repeat=Repeat.REQUEST_ID,
)
DROP_PARTITION: Final = _call(
    CATALOG_PREFIX + "drop_partition",
    Role.ADMIN,
    ResourceKind.COLLECTION,
    "drop a partition with its rows",
    request="name partition request?",
    answer="collection",
    repeat=Repeat.REQUEST_ID,
)

ALIASES: Final = _call(
    CATALOG_PREFIX + "aliases",
    ANY_ROLE,
    Scope.ANYTHING,
    "list the aliases of collections with any role",
    request="collection?",
    answer="aliases",
)
CREATE_ALIAS: Final = _call(
    CATALOG_PREFIX + "create_alias",
    Role.OPERATE,
    ResourceKind.COLLECTION,
    "give a collection an alias; the role also on the alias's name",
    argument="collection",
    request="alias collection request?",
    repeat=Repeat.REQUEST_ID,
)
ALTER_ALIAS: Final = _call(
    CATALOG_PREFIX + "alter_alias",
    Role.OPERATE,
    ResourceKind.COLLECTION,
    "point an alias to another collection; the role also on the former one",
    argument="collection",
    request="alias collection request?",
    repeat=Repeat.REQUEST_ID,
)
DROP_ALIAS: Final = _call(
    CATALOG_PREFIX + "drop_alias",
    Role.OPERATE,
    ResourceKind.COLLECTION,
    "drop an alias",
    argument="alias",
    request="alias request?",
    repeat=Repeat.REQUEST_ID,
)

# --- handlers -----------------------------------------------------------------------------------------------------

Handler = TypeVar("Handler", bound=Callable[..., Any])
_MARK: Final = "__millrace_calls__"


def handles(*calls: ServerCall) -> Callable[[Handler], Handler]:
    """Mark a method or function as the handler of `calls`; :func:`handlers_of` finds it."""

    def mark(handler: Handler) -> Handler:
        setattr(handler, _MARK, calls)
        return handler

    return mark


def handlers_of(owner: object, calls: Iterable[ServerCall]) -> Mapping[str, Callable[..., Any]]:
    """Return the handlers of `calls` among the attributes of `owner`, an object or a module, by the calls' keys.

    Raises InvalidArgument if a call has no handler or several, or a handler's call is not among `calls`: a server
    checks this when it starts.
    """
    found: dict[str, Callable[..., Any]] = {}
    declared = owner if isinstance(owner, ModuleType) else type(owner)  # an object may not be complete yet
    for name in dir(declared):
        for call in getattr(getattr(declared, name, None), _MARK, ()):
            if call.key in found:
                raise InvalidArgument(f"the call {call.key!r} has two handlers: remove one")
            found[call.key] = getattr(owner, name)
    wanted = {call.key for call in calls}
    if missing := sorted(wanted - found.keys()):
        raise InvalidArgument(f"the call {missing[0]!r} has no handler: add one with @handles")
    if unknown := sorted(found.keys() - wanted):
        raise InvalidArgument(f"the handler of {unknown[0]!r} has no entry in the server's calls: add one")
    return found


def server_calls(prefix: str) -> tuple[ServerCall, ...]:
    """Return the calls of the log itself (prefix ""), of the append host ("append/") or of the coordinator."""
    return tuple(each for each in SERVER_CALLS.values() if each.name.rpartition("/")[0] == prefix.rstrip("/"))
