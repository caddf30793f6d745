"""``millrace wal``: the ``wal`` Delta table: what it holds, whether it holds together, and what was rejected.

No server needed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.base.errors import InvalidArgument
from millrace.commands.parts.command_line import (
    EXIT_VERIFICATION_FAILED,
    INSPECT_PANEL,
    JsonContext,
    command_group,
    iso_time,
    print_json,
    print_rows,
    tick_time,
)
from millrace.wal.reasons import Reason

if TYPE_CHECKING:
    from millrace.tables.wal.table import WalTable

app = command_group("wal", INSPECT_PANEL, "Inspect and verify the WAL table, and search rejections.")

_NONE = "The WAL is empty: the streaming job has committed nothing yet."


@app.command()
def describe(context: JsonContext) -> None:
    """Show each PChannel's position, time tick, rows and digest, and the table's files.

    Example: `millrace wal describe`
    """

    path = context.settings.wal_uri
    wal = _open(path)
    rows: list[dict[str, Any]] = []
    files: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    if wal is not None:
        actions = wal.table.actions()
        for kind, size in zip(actions["partition.kind"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True):
            files[kind] += 1
            sizes[kind] += size
        for name, position in sorted(wal.positions(wal.pchannels()).items()):
            state = position.state
            rows.append(
                {
                    "pchannel": name,
                    "position": str(position.position),
                    "term": 0 if state is None else state.term,
                    "last_tick": position.last_tick,
                    "time": tick_time(position.last_tick),
                    "commits": position.commits,
                    "messages": position.totals.messages,
                    "rejections": position.totals.rejections,
                    "digest": str(position.totals.digest),
                }
            )
    version = None if wal is None else wal.version
    if context.as_json:
        print_json(
            {"path": str(path), "version": version, "files": dict(files), "bytes": dict(sizes), "pchannels": rows}
        )
        return
    columns = ("pchannel", "position", "term", "last_tick", "time", "commits", "messages", "rejections", "digest")
    print_rows(rows, columns=columns, as_json=False, empty=_NONE)
    if wal is not None:
        parts = [f"{files[kind]:,} of {kind}s ({sizes[kind] / 1e6:,.1f} MB)" for kind in sorted(files)]
        typer.echo(f"{path}, version {version}; files: {', '.join(parts)}")


@app.command()
def verify(context: JsonContext) -> None:
    """Verify order, totals and digests of the WAL's rows, without the log. The exit code is 3 if a check fails.

    `millrace verify` goes further: it runs the log again and counts the collections.

    Example: `millrace wal verify`
    """
    from millrace.commands.verify import check_channels

    settings = context.settings
    rows = check_channels(settings, log=None)
    print_rows(
        rows,
        columns=("pchannel", "holds", "messages", "rejections", "committed", "stored", "detail"),
        as_json=context.as_json,
        empty=_NONE,
    )
    if not all(row["holds"] for row in rows):
        raise typer.Exit(EXIT_VERIFICATION_FAILED)


@app.command()
def rejections(
    context: JsonContext,
    reason: Annotated[
        list[str] | None,
        typer.Option("--reason", metavar="REASON", help="Only rejections with this reason. Repeatable."),
    ] = None,
    pchannel: Annotated[str | None, typer.Option(metavar="PCHANNEL", help="Only of this one.")] = None,
    principal: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only of this principal, such as the name of a token.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rejections, newest first.")] = 100,
    counts: Annotated[bool, typer.Option("--counts", help="Show only the number by reason.")] = False,
) -> None:
    """List the messages that the chain rejected, with reason, origin and detail, newest first.

    Example: `millrace wal rejections --reason SCHEMA_MISMATCH --limit 5`

    Example: `millrace wal rejections --counts`
    """
    wanted = [_reason(text) for text in reason or []]
    wal = _open(context.settings.wal_uri)
    rows = [] if wal is None else _search(wal, wanted, pchannel, principal, limit, counts)
    columns = ("reason", "messages", "rows") if counts else (
        "reason", "pchannel", "id", "time", "type", "vchannel", "rows", "producer_id", "sequence", "principal",
        "detail",
    )  # fmt: skip
    print_rows(
        rows, columns=columns, as_json=context.as_json, empty="Nothing was rejected" + (" so." if wanted else ".")
    )


def _open(uri: str) -> WalTable | None:
    from millrace.storage.table import open_table
    from millrace.tables.wal.table import WalTable

    table = open_table(uri)
    return None if table is None else WalTable(table)


def _reason(text: str) -> str:
    try:
        return Reason(text.strip().upper()).value
    except ValueError:
        raise InvalidArgument(f"no reason {text!r}; reasons are {', '.join(sorted(Reason))}") from None


def _search(
    wal: WalTable, reasons: list[str], pchannel: str | None, principal: str | None, limit: int, counts: bool
) -> list[dict[str, Any]]:
    """Return the rejections in the ``wal`` table, newest first. DuckDB holds at most `limit` at a time."""
    import duckdb

    from millrace.message.tombstones import MAX_VALUE_BYTES, describe_value

    conditions = ["kind = 'rejection'"]
    if pchannel is not None:
        conditions.append("pchannel = $pchannel")
    if reasons:
        conditions.append("reason in (select unnest($reasons::varchar[]))")
    dataset = wal.table.dataset()
    # A table that no process of this build has committed to lacks the column.
    writer = "principal" if "principal" in dataset.schema.names else "null::varchar"
    if principal is not None:
        conditions.append(f"{writer} = $principal")
    source, where = "wal_rows", "where " + " and ".join(conditions)
    given: dict[str, Any] = ({"pchannel": pchannel} if pchannel is not None else {}) | (
        {"reasons": reasons} if reasons else {}
    )
    given |= {"principal": principal} if principal is not None else {}
    with duckdb.connect() as db:
        db.register("wal_rows", dataset)
        if counts:
            found = db.execute(
                f"select reason, count(*) as messages, sum(rows)::bigint as rows from {source} {where} "
                "group by reason order by messages desc, reason",
                given,
            )
        else:
            found = db.execute(
                'select reason, pchannel, ledger, entry, "index", ordinal, time_tick, physical_ms, type, vchannel,'
                " term, "
                "collection_id, partition_id, rows, txn_id, producer_id, epoch, sequence, "
                f"{writer} as principal, detail, "
                f"octet_length(payload) as bytes, case when reason = '{Reason.MALFORMED}' and octet_length(payload) <= "
                f"{MAX_VALUE_BYTES} then payload end as head from {source} {where} "
                f'order by physical_ms desc, pchannel, ledger desc, entry desc, "index" desc, ordinal desc limit'
                f" {limit}",
                given,
            )
        names = [item[0] for item in found.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    if counts:
        return rows
    return [
        {
            "reason": row["reason"],
            "pchannel": row["pchannel"],
            "id": ":".join(str(row[part]) for part in ("ledger", "entry", "index", "ordinal")),
            "time": iso_time(row["physical_ms"]),
        }
        | {name: value for name, value in row.items() if name not in {"ledger", "entry", "index", "ordinal", "head"}}
        | {"detail": describe_value(row["head"] or b"") or row["detail"]}
        for row in rows
    ]
