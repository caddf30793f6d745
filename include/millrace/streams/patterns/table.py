"""MATCH_RECOGNIZE over a whole table, at once."""

from __future__ import annotations

import pyarrow as pa

from millrace.streams.patterns.find import Finder
from millrace.streams.patterns.measures import answer, check_conditions
from millrace.streams.patterns.query import MatchRecognize
from millrace.streams.patterns.sorted_rows import sort


def match_table(query: MatchRecognize, table: pa.Table) -> pa.Table:
    """Return the answer to `query` over `table`.

    Rows that the order calls equal stay in the table's order; partitions come in the order of their first rows. Raises
    InvalidArgument.
    """
    check_conditions(query, table.schema)
    rows = sort(table, query)
    return answer(query, rows, Finder(query, rows).find().matches)


def match_recognize(table: pa.Table, query: str | MatchRecognize) -> pa.Table:
    """Return the answer to a MATCH_RECOGNIZE over the rows of an Arrow table (docs/patterns.md).

    `query` is the content of SQL's ``MATCH_RECOGNIZE (...)``, or made by :func:`millrace.row`. Rows that ORDER BY calls
    equal stay in the table's order; partitions come in the order of their first rows. Raises InvalidArgument.
    """
    if isinstance(query, str):
        from millrace.streams.patterns.sql import parse

        query = parse(query)
    return match_table(query, table)


def answer_schema(query: MatchRecognize, schema: pa.Schema) -> pa.Schema:
    """Return the columns of the answer over rows of `schema`. Raises InvalidArgument if they do not fit the query."""
    return match_table(query, schema.empty_table()).schema
