"""Reasons why the chain rejects a message: the values of the WAL's ``reason`` column and of AppendRejected."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The reason of a rejection. The values are stored: never rename one."""

    MALFORMED = "MALFORMED"
    UNSUPPORTED_TYPE = "UNSUPPORTED_TYPE"
    TERM_FENCED = "TERM_FENCED"
    TERM_NOT_OPENED = "TERM_NOT_OPENED"
    DUPLICATE = "DUPLICATE"
    ALREADY_APPLIED = "ALREADY_APPLIED"
    SEQUENCE_GAP = "SEQUENCE_GAP"
    UNKNOWN_PRODUCER = "UNKNOWN_PRODUCER"
    PRODUCER_FENCED = "PRODUCER_FENCED"
    VCHANNEL_NOT_FOUND = "VCHANNEL_NOT_FOUND"
    COLLECTION_NOT_FOUND = "COLLECTION_NOT_FOUND"
    COLLECTION_EXISTS = "COLLECTION_EXISTS"
    PARTITION_NOT_FOUND = "PARTITION_NOT_FOUND"
    PARTITION_EXISTS = "PARTITION_EXISTS"
    SCHEMA_MISMATCH = "SCHEMA_MISMATCH"
    WRONG_VCHANNEL = "WRONG_VCHANNEL"
    DUPLICATE_KEY = "DUPLICATE_KEY"
    CHECK_VIOLATED = "CHECK_VIOLATED"
    TXN_EXISTS = "TXN_EXISTS"
    TXN_NOT_FOUND = "TXN_NOT_FOUND"
    TXN_NOT_ACTIVE = "TXN_NOT_ACTIVE"
    TXN_EXPIRED = "TXN_EXPIRED"
    TXN_TOO_LARGE = "TXN_TOO_LARGE"
    TOO_LARGE = "TOO_LARGE"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    NO_EFFECT = "NO_EFFECT"


SEQUENCE_NEUTRAL_REASONS = frozenset(
    {
        Reason.MALFORMED,
        Reason.UNSUPPORTED_TYPE,
        Reason.TERM_FENCED,
        Reason.TERM_NOT_OPENED,
        Reason.DUPLICATE,
        Reason.ALREADY_APPLIED,
        Reason.SEQUENCE_GAP,
        Reason.UNKNOWN_PRODUCER,
        Reason.PRODUCER_FENCED,
        Reason.TOO_LARGE,
    }
)
"""Rejections that do not use up the producer's sequence number. All others do."""
