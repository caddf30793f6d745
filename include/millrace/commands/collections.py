"""``millrace collections``: what there is, and DDL.

Listing reads the coordinator's file; changes go through the log.
"""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, InvalidArgument
from millrace.catalog.sqlite_file import read_aliases, read_collections_by_id, read_page
from millrace.commands.parts.command_line import (
    DATA_PANEL,
    CollectionName,
    CommandContext,
    JsonContext,
    command_group,
    complete_collection,
    find_collection,
    print_facts,
    print_rows,
    tick_time,
)
from millrace.message.types import OnDuplicate

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.catalog.collection import CollectionInfo

app = command_group("collections", DATA_PANEL, "Create, describe, alter and drop collections.")

_POLL_SECONDS = 0.1


@app.command("list")
def list_collections(
    context: JsonContext,
    dropped: Annotated[bool, typer.Option("--dropped", help="Include dropped collections.")] = False,
    search: Annotated[str, typer.Option(metavar="TEXT", help="Only collections whose name contains this.")] = "",
    after: Annotated[str, typer.Option(metavar="NAME", help="Only collections after this name, or after a page.")] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many collections. Default: 100; all with --json.")
    ] = None,
) -> None:
    """List the collections by name.

    Example: `millrace collections list --json`

    Example: `millrace collections list --search flights --limit 20`
    """
    from millrace.catalog.collection import MAX_PAGE_SIZE, PAGE_SIZE, CollectionQuery

    left = limit or (None if context.as_json else PAGE_SIZE)
    rows: list[dict[str, Any]] = []
    while True:
        size = MAX_PAGE_SIZE if left is None else min(left - len(rows), MAX_PAGE_SIZE)
        page = read_page(context.settings.data_dir, CollectionQuery(dropped, search, after, limit=size))
        rows += map(_summary, page.items)
        after = page.next
        if not after or len(rows) == left:
            break
    print_rows(
        rows,
        columns=("name", "id", "state", "vchannels", "partitions", "fields", "primary_key", "schema_version"),
        as_json=context.as_json,
        empty=f"No collection's name contains {search!r}."
        if search
        else "No collections yet: `millrace collections create --help` tells how to make one.",
    )
    if after and not context.as_json:
        typer.echo(
            f"{len(rows):,} of {page.total:,} collections. Next: --after {shlex.quote(after)}; --search TEXT"
            " finds some, --limit shows more."
        )


@app.command()
def create(
    context: JsonContext,
    name: Annotated[str, typer.Argument(metavar="COLLECTION", help="The new collection's name.")],
    field: Annotated[
        list[str] | None,
        typer.Option("--field", metavar="NAME:TYPE[?]", help="A field, in order; ? makes it nullable. Repeatable."),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="FIELD", help="A field of the primary key, in the key's order. Repeatable."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Take the fields of a Parquet, CSV or JSON lines file."),
    ] = None,
    event_time: Annotated[str | None, typer.Option(help="The timestamp or date field with the event time.")] = None,
    on_duplicate: Annotated[
        OnDuplicate,
        typer.Option(help="What an insert of an existing key does: keep both rows, or replace the older one."),
    ] = "keep",
    generated_key: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Instead of --key: a uuid field that producers fill if a row has no value."),
    ] = None,
    default: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="What a row has that does not say it; now() is its time. Repeat it."),
    ] = None,
    computed: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help="A field computed from others. Repeatable.")
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=CONDITION", help="A condition that every row must satisfy. Repeatable."),
    ] = None,
    vchannels: Annotated[int, typer.Option(min=1, help="Number of VChannels that share the rows.")] = 1,
    partition: Annotated[
        list[str] | None, typer.Option("--partition", metavar="NAME", help="A partition. Repeatable.")
    ] = None,
) -> None:
    """Create a collection, from fields or from a file's.

    Types are bool, int8, int16, int32, int64, float32, float64, string, binary, date, timestamp, timestamp_ntz, uuid,
    json, `decimal(10,2)`, `list<T>`, `map<K, V>` and `struct<a: T, b: U>` of them. A --field beside --from goes over
    the file's.

    Example: `millrace collections create users --field id:int64 --field 'name:string?' --key id`

    Example: `millrace collections create orders --field id:int64 --field qty:int32 --default qty=1 --check 'some=qty >
    0' --key id`

    Example: `millrace collections create flights --from flights.csv --key id --vchannels 4 --partition EWR --partition
    JFK`
    """
    from millrace.client.database import connect
    from millrace.client.schemas import with_rules
    from millrace.commands.parts.collection_schema import make_schema, parse_rules

    schema = make_schema(
        fields=field or [],
        source=source,
        key=key or [],
        event_time=event_time,
        on_duplicate=on_duplicate,
        generated_key=generated_key,
    )
    schema = with_rules(schema, parse_rules(default), parse_rules(computed), parse_rules(check))
    with connect(settings=context.settings) as db:
        made = db.catalog.create_collection(name, schema, vchannels=vchannels, partitions=partition or ["_default"])
    if context.as_json:
        print_facts(_summary(made) | {"schema": schema.to_json()}, as_json=True)
    else:
        typer.echo(f"Created {name} (id {made.id}) on {', '.join(made.vchannels)}.")


@app.command()
def describe(context: JsonContext, name: CollectionName) -> None:
    """Show a collection's fields, partitions, VChannels, the location of its rows, and what is published of it.

    Example: `millrace collections describe users`
    """
    from millrace.node.publish.status import published_status
    from millrace.tables.collections.data_tables import rows_uri

    settings = context.settings
    found = find_collection(settings, name)
    published = published_status(settings, found.id)
    facts = _summary(found) | {
        "event_time": found.schema.event_time,
        "on_duplicate": found.schema.on_duplicate,
        "generated_key": found.schema.generated_key,
        "aliases": [*read_aliases(settings.data_dir, found.id)],
        **_rules(found),
        "table": str(rows_uri(settings, found.id)),
    }
    if context.as_json:
        facts |= {"fields": found.schema.to_json()["fields"], "partition_ids": found.partitions}
        print_facts(facts | {"published": published.to_json()}, as_json=True)
        return
    facts |= {"published": published.words}
    print_facts({each: value for each, value in facts.items() if each != "fields"}, as_json=False)
    print_rows(
        [
            {"field": each.name, "type": each.type, "null": each.nullable, "key": each.name in found.schema.key_names}
            for each in found.schema.fields
        ],
        columns=("field", "type", "null", "key"),
        as_json=False,
        empty="",
    )


@app.command()
def drop(
    context: CommandContext,
    name: CollectionName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Drop a collection. Its tables stay, for reads at earlier ticks; docs/operating.md says how to remove them.

    Example: `millrace collections drop users --yes`
    """
    settings = context.settings
    found = find_collection(settings, name)
    if not yes:
        typer.confirm(f"Drop {name} (id {found.id}) in {settings.data_dir}?", abort=True)
    with _client(settings) as client:
        client.catalog.drop_collection(name)
    typer.echo(f"Dropped {name} (id {found.id}).")


@app.command()
def flush(
    context: JsonContext,
    name: CollectionName,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the flusher has written everything to the table.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Maximum wait, in seconds.")] = 300.0,
) -> None:
    """Seal and flush the growing segments of a collection.

    The flush is a message in the log. The streaming job carries it out (`millrace jobs run --with-flusher`).

    Example: `millrace collections flush users --wait`
    """
    settings = context.settings
    find_collection(settings, name)
    with _client(settings) as client:
        ticks = client.catalog.flush(name)
    if wait:
        _wait_flushed(settings, ticks, timeout)
    rows = [{"vchannel": vchannel, "tick": tick, "time": tick_time(tick)} for vchannel, tick in sorted(ticks.items())]
    print_rows(rows, columns=("vchannel", "tick", "time"), as_json=context.as_json, empty="")
    if not context.as_json and not any(ticks.values()):
        typer.echo("There were no growing segments.")


@app.command()
def publish(
    context: JsonContext,
    name: CollectionName,
    anew: Annotated[
        bool, typer.Option("--anew", help="Judge every row again, whatever was published. Cures a wrong version.")
    ] = False,
) -> None:
    """Publish what a collection's tables hold now, as a new version of its plain Delta table.

    The flusher does this by itself (`publish_interval`). Both may run at once.

    Example: `millrace collections publish users`
    """
    from millrace.node.publish.definition import publish as publish_now
    from millrace.node.publish.status import published_status

    settings = context.settings
    found = find_collection(settings, name)
    publish_now(settings, found.id, anew=anew)
    status = published_status(settings, found.id)
    print_facts(status.to_json() | {"time": tick_time(status.tick) if status.tick else ""}, as_json=context.as_json)


@app.command("add-field")
def add_field(
    context: CommandContext,
    name: CollectionName,
    field: Annotated[str, typer.Argument(metavar="NAME:TYPE?", help="The new field; it must be nullable.")],
) -> None:
    """Add a field. It is null in existing rows.

    Example: `millrace collections add-field users 'email:string?'`
    """
    from millrace.commands.parts.collection_schema import parse_field
    from millrace.message.schema_changes import AddField

    spec = parse_field(field)
    settings = context.settings
    find_collection(settings, name)
    if not spec.nullable:
        raise InvalidArgument(f"the rows that are there have no {spec.name!r}: write it as '{field}?'")
    with _client(settings) as client:
        version = client.catalog.alter(name, [AddField(spec)])
    typer.echo(f"Added {spec.name} ({spec.type}) to {name}: schema version {version}.")


@app.command("alter")
def alter(
    context: CommandContext,
    name: CollectionName,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="Drop a field; a field of a struct by its path, address.zip."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="OLD:NEW", help="Rename a field, or a field of a struct by its path."),
    ] = None,
    widen: Annotated[
        list[str] | None, typer.Option(metavar="NAME:TYPE", help="Change a field to a wider type.")
    ] = None,
    relax: Annotated[list[str] | None, typer.Option(metavar="FIELD", help="Make a field nullable.")] = None,
    add: Annotated[list[str] | None, typer.Option(metavar="NAME:TYPE?", help="Add a nullable field.")] = None,
    computed: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help="Compute an added field from others.")
    ] = None,
    order: Annotated[
        str | None, typer.Option(metavar="FIELD,…", help="Move these fields to the front, in this order.")
    ] = None,
    set_default: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="What a row has that does not say it; now() is its time."),
    ] = None,
    drop_default: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help="Drop the default of a field.")
    ] = None,
    add_check: Annotated[
        list[str] | None, typer.Option(metavar="NAME=CONDITION", help="Add a check that new rows must satisfy.")
    ] = None,
    drop_check: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Drop a check.")] = None,
) -> None:
    """Change the schema at one tick. The order is: drop, rename, widen, relax, add, order.

    Checks and defaults are dropped before and added after the other changes. Reads of earlier ticks use the older
    schema, and producers that know only that schema continue to work.

    Example: `millrace collections alter users --rename mail:email --widen age:int64 --add 'city:string?' --drop note`
    """
    from millrace.client.nested_changes import resolve_paths
    from millrace.client.schemas import alter_changes
    from millrace.commands.parts.collection_schema import parse_field, parse_pair, parse_rules

    made = alter_changes(
        drop_check=drop_check or (),
        drop_default=drop_default or (),
        drop=drop or (),
        rename=dict(map(parse_pair, rename or ())),
        widen=dict(map(parse_pair, widen or ())),
        relax=relax or (),
        add={spec.name: spec.type + "?" * spec.nullable for spec in map(parse_field, add or ())} or None,
        computed=parse_rules(computed),
        order=order or (),
        set_default=parse_rules(set_default),
        add_check=parse_rules(add_check),
    )
    settings = context.settings
    find_collection(settings, name)
    with _client(settings) as client:
        version = client.catalog.alter(name, resolve_paths(made, lambda: client.definition(name).schema))
        fields = client.definition(name).schema.fields
    shown = ", ".join(f"{each.name}:{each.type}{'?' * each.nullable}" for each in fields)
    typer.echo(f"{name} has schema version {version}: {shown}.")


@app.command("add-partition")
def add_partition(
    context: CommandContext,
    name: CollectionName,
    partition: Annotated[str, typer.Argument(metavar="PARTITION", help="The new partition's name.")],
) -> None:
    """Add a partition.

    Example: `millrace collections add-partition users eu`
    """
    settings = context.settings
    find_collection(settings, name)
    with _client(settings) as client:
        number = client.catalog.create_partition(name, partition)
    typer.echo(f"Added the partition {partition} (id {number}) to {name}.")


@app.command("drop-partition")
def drop_partition(
    context: CommandContext,
    name: CollectionName,
    partition: Annotated[str, typer.Argument(metavar="PARTITION", help="The partition's name.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Drop a partition with its rows.

    Example: `millrace collections drop-partition users eu --yes`
    """
    settings = context.settings
    find_collection(settings, name)
    if not yes:
        typer.confirm(f"Drop the partition {partition} of {name} with its rows?", abort=True)
    with _client(settings) as client:
        client.catalog.drop_partition(name, partition)
    typer.echo(f"Dropped the partition {partition} of {name}.")


AliasName = Annotated[str, typer.Argument(metavar="ALIAS", help="The alias.")]


@app.command("aliases")
def list_aliases(
    context: JsonContext,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[COLLECTION]", help="Only this collection's aliases.", autocompletion=complete_collection
        ),
    ] = None,
) -> None:
    """List the aliases of collections.

    Example: `millrace collections aliases`
    """
    folder = context.settings.data_dir
    found = read_aliases(folder, None if name is None else find_collection(context.settings, name).id)
    known = read_collections_by_id(folder, found.values())
    rows = [
        {"alias": alias, "collection": known[number].name, "id": number, "state": known[number].state}
        for alias, number in found.items()
        if number in known
    ]
    print_rows(
        rows,
        columns=("alias", "collection", "id", "state"),
        as_json=context.as_json,
        empty="No aliases." if name is None else f"{name} has no aliases.",
    )


@app.command("create-alias")
def create_alias(context: CommandContext, alias: AliasName, name: CollectionName) -> None:
    """Give a collection an alias, which reads, writes and changes of it accept as its name.

    Example: `millrace collections create-alias flights flights_v1`
    """
    with _client(context.settings) as client:
        client.create_alias(alias, name)
    typer.echo(f"{alias} is an alias of {name}.")


@app.command("alter-alias")
def alter_alias(context: CommandContext, alias: AliasName, name: CollectionName) -> None:
    """Point an alias to another collection, at once.

    Example: `millrace collections alter-alias flights flights_v2`
    """
    with _client(context.settings) as client:
        client.alter_alias(alias, name)
    typer.echo(f"{alias} is an alias of {name}.")


@app.command("drop-alias")
def drop_alias(context: CommandContext, alias: AliasName) -> None:
    """Drop an alias. The collection stays.

    Example: `millrace collections drop-alias flights`
    """
    with _client(context.settings) as client:
        client.drop_alias(alias)
    typer.echo(f"Dropped the alias {alias}.")


def _client(settings: Settings) -> Any:
    from millrace.client.database import connect

    return connect(settings=settings)


def _summary(found: CollectionInfo) -> dict[str, Any]:
    return {
        "name": found.name,
        "id": found.id,
        "state": found.state,
        "vchannels": list(found.vchannels),
        "partitions": list(found.partitions),
        "fields": [f"{each.name}:{each.type}{'?' if each.nullable else ''}" for each in found.schema.fields],
        "primary_key": found.schema.to_json()["primary_key"],
        "schema_version": found.schema_version,
    }


def _rules(found: CollectionInfo) -> dict[str, str]:
    """Return defaults, computed fields and checks as text, if there are any."""
    if not (found.schema.has_fill_values or found.schema.has_row_rules):
        return {}
    from millrace.message.expression.rules import describe_rules

    return describe_rules(found.schema)


def _wait_flushed(settings: Settings, ticks: dict[str, int], timeout: float) -> None:
    """Wait until the checkpoints have reached the tick of each VChannel's flush. Raises DeadlineExceeded."""
    from millrace.message.ids import pchannel_of
    from millrace.storage.table import open_table
    from millrace.tables.collections.flush_tables import read_checkpoints

    wanted: Counter[str] = Counter()
    for vchannel, tick in ticks.items():
        wanted[pchannel_of(vchannel)] = max(wanted[pchannel_of(vchannel)], tick)
    path, end = settings.checkpoints_uri, Deadline.after(timeout)
    while True:
        found = read_checkpoints(open_table(path))
        behind = [name for name, tick in wanted.items() if tick and (name not in found or found[name].time_tick < tick)]
        if not behind:
            return
        if not end.pause(_POLL_SECONDS):
            raise DeadlineExceeded(
                f"not flushed after {timeout:g} s on {', '.join(sorted(behind))}: is the flusher running? "
                "`millrace status` tells, `millrace jobs run --with-flusher` starts it"
            )
