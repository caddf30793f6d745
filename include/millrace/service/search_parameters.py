"""Search parameters of the API and the pages: text from a URL, validated and turned into a query."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Query as Parameter

from millrace.base.errors import InvalidArgument
from millrace.observe.message_views import TXN_END_TYPES
from millrace.observe.wal_search import WalQuery

MAX_MS = 253_402_300_799_000
"""The end of the year 9999."""

Text = Annotated[str, Parameter(max_length=200)]


def message_query(
    pchannel: Text = "",
    vchannel: Text = "",
    type: Text = "",
    collection: Text = "",
    producer: Text = "",
    principal: Text = "",
    since: Text = "",
    until: Text = "",
) -> WalQuery:
    """Build a search for accepted messages, as :func:`rejection_query` does. Raises InvalidArgument."""
    found = rejection_query(pchannel, vchannel, "", type, collection, producer, principal, since, until)
    return replace(found, kind="message")


def rejection_query(
    pchannel: Text = "",
    vchannel: Text = "",
    reason: Text = "",
    type: Text = "",
    collection: Text = "",
    producer: Text = "",
    principal: Text = "",
    since: Text = "",
    until: Text = "",
) -> WalQuery:
    """Build a search for rejections. Times are ISO 8601 (UTC without a zone) or Unix seconds.

    Raises InvalidArgument.
    """
    return WalQuery(
        "rejection",
        pchannel=pchannel.strip(),
        vchannel=vchannel.strip(),
        reason=reason.strip(),
        types=(type.strip().upper(),) if type.strip() else (),
        collection_id=parse_id("collection", collection),
        producer_id=parse_id("producer", producer),
        principal=principal.strip(),
        since_ms=parse_moment_ms("since", since),
        until_ms=parse_moment_ms("until", until),
    )


def transaction_query(
    pchannel: Text = "",
    vchannel: Text = "",
    txn: Text = "",
    state: Text = "",
    principal: Text = "",
    since: Text = "",
    until: Text = "",
) -> WalQuery:
    """Build a search for transactions. Raises InvalidArgument."""
    states = {
        "": TXN_END_TYPES,
        "committed": TXN_END_TYPES[:1],
        "rolled back": TXN_END_TYPES[1:],
        "rolled_back": TXN_END_TYPES[1:],
    }
    if state not in states:
        raise InvalidArgument("state: committed, rolled_back, or nothing for both")
    return WalQuery(
        "message",
        pchannel=pchannel.strip(),
        vchannel=vchannel.strip(),
        txn_id=parse_id("txn", txn),
        types=states[state],
        principal=principal.strip(),
        since_ms=parse_moment_ms("since", since),
        until_ms=parse_moment_ms("until", until),
    )


def parse_id(name: str, text: str) -> int | None:
    """Parse a 64-bit id; None for empty text. Raises InvalidArgument."""
    text = text.strip()
    if not text:
        return None
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 20) or abs(int(text)) >= 1 << 63:
        raise InvalidArgument(f"{name}: a whole number of 64 bits, not {text[:40]!r}")
    return int(text)


def parse_moment_ms(name: str, text: str) -> int | None:
    """Parse a time into Unix milliseconds; None for empty text. Raises InvalidArgument."""
    text = text.strip()
    if not text:
        return None
    try:
        if text.isascii() and text.replace(".", "", 1).isdigit():
            found = int(float(text) * 1000)
        else:
            parsed = datetime.fromisoformat(text.replace(" ", "+") if text.count(" ") == 1 and "T" in text else text)
            found = int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"{name}: a moment such as 2026-11-21T13:00, or Unix seconds, not {text[:40]!r}"
        ) from None
    if not 0 <= found <= MAX_MS:
        raise InvalidArgument(f"{name}: a moment between 1970 and 9999")
    return found
