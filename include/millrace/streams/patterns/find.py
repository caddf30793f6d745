"""Finds the matches in sorted rows: masks from conditions, matches from starts, the next start by AFTER MATCH SKIP."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.base.errors import InvalidArgument
from millrace.streams.patterns.board import Board, Flags, Places, next_true
from millrace.streams.patterns.captures import Memory
from millrace.streams.patterns.expressions import Call, Expression, conjuncts, is_local
from millrace.streams.patterns.matcher import Span, Threads
from millrace.streams.patterns.operations import Failed
from millrace.streams.patterns.pattern import Absent
from millrace.streams.patterns.pattern import Sequence as InOrder
from millrace.streams.patterns.program import compiled
from millrace.streams.patterns.query import MatchRecognize
from millrace.streams.patterns.solver import NO, OPEN, YES, Node, TooDeep, Traces, build
from millrace.streams.patterns.sorted_rows import SortedRows, within_units

_ASK, _KNOWN, _WAIT = 0, 1, 2


@dataclass(frozen=True)
class Matches:
    """Matches in the order of their first rows.

    The rows of match `m` are ``start[m]`` and the following, with the codes and flags from ``offsets[m]`` up to
    ``offsets[m + 1]``.
    """

    start: Places
    offsets: Places
    codes: npt.NDArray[np.int16]
    excluded: Flags
    number: Places
    """Number of each match within its partition, from 1."""

    @property
    def rows(self) -> Places:
        """The row of each flat place."""
        lengths = np.diff(self.offsets)
        return np.repeat(self.start - self.offsets[:-1], lengths) + np.arange(len(self.codes))


@dataclass(frozen=True)
class Found:
    matches: Matches
    undecided: Places
    """The first row of each partition that may still begin a match when rows come; the partition's end if none may."""


class Finder:
    """One query over one set of sorted rows.

    `begin` is the first row of each partition at which a match may begin, and `base` the number of earlier matches. No
    further row comes at or before `watermark`, in the units of WITHIN.
    """

    def __init__(
        self,
        query: MatchRecognize,
        rows: SortedRows,
        *,
        begin: Places | None = None,
        base: Places | None = None,
        watermark: int | None = None,
    ) -> None:
        self._query, self._rows, self._board = query, rows, rows.board
        self._begin, self._watermark = begin, watermark
        self._base = np.zeros(len(self._board.starts), dtype=np.int64) if base is None else base
        self._names = query.variables
        last = query.pattern.parts[-1] if isinstance(query.pattern, InOrder) else query.pattern
        self._absent = last.name if isinstance(last, Absent) else None
        self._masks: dict[str, Flags] = {}
        self._rest: dict[str, Expression] = {}
        for name in self._names:
            parts = conjuncts(query.define[name]) if name in query.define else []
            mask = np.ones(self._board.rows, dtype=np.bool_)
            rest = []
            for each in parts:
                found = self._local(each, name)
                if found is None:
                    rest.append(each)
                else:
                    mask &= found
            self._masks[name] = mask
            if rest:
                self._rest[name] = rest[0] if len(rest) == 1 else Call("and", tuple(rest))
        self._ends: list[int] = np.append(self._board.starts[1:], self._board.rows).tolist()
        self._made: Threads | None = None

    def _local(self, condition: Expression, name: str) -> Flags | None:
        """Return the mask of the rows where a condition holds.

        None if it depends on matched rows, or fails in a row that may never be needed.
        """
        if not is_local(condition, name):
            return None
        try:
            return self._rows.local(condition, name)
        except Failed:
            if name == self._absent:
                raise
            return None

    def find(self) -> Found:
        """Return the matches, by the rule of AFTER MATCH SKIP. Raises InvalidArgument if that rule fails."""
        places, status, ends, nodes = self._candidates()
        return self._take(places, status, ends, nodes)

    def _candidates(self) -> tuple[Places, npt.NDArray[np.int8], Places, list[tuple[Node, Places]]]:
        """Return the places at which a match may begin, their states, the ends of known matches, and the nodes.

        A state says whether a start is known, asked for or waited for. Each node has the indices of the candidates that
        it knows.
        """
        board, query = self._board, self._query
        masks = {name: board.padded(mask) for name, mask in self._masks.items()}
        is_row = np.ones(board.size, dtype=np.bool_)
        is_row[board.last] = False
        if self._begin is not None:
            early = np.arange(board.rows) < self._begin[board.partition_of_row]
            is_row[board.place_of(np.flatnonzero(early))] = False
        final = np.full(board.size, YES, dtype=np.int8)
        try:
            node = build(query.pattern, board, masks, self._names)
            value = node.solve(final)
        except TooDeep:
            places = np.flatnonzero(is_row)
            return places, np.zeros(len(places), dtype=np.int8), places, []
        over = self._over() if board.open.any() and query.within is not None else None
        closed_node = None
        if over is not None and over.any():
            shut = Board(board.rows, board.starts, np.zeros(len(board.starts), dtype=np.bool_), board.times)
            closed_node = build(query.pattern, shut, masks, self._names)
            over_places = board.padded(over)
            value = np.where(over_places, closed_node.solve(final), value)
        places = np.flatnonzero(is_row & (value != NO))
        status = np.full(len(places), _ASK, dtype=np.int8)
        ends = places.copy()
        if self._rest:
            return places, status, ends, []
        status[value[places] == OPEN] = _WAIT
        by_threads = np.zeros(len(places), dtype=np.bool_)
        nodes = []
        is_over = over_places[places] if closed_node is not None else np.zeros(len(places), dtype=np.bool_)
        for each, mine in ((node, ~is_over), (closed_node, is_over)):
            known = np.flatnonzero(mine & (value[places] == YES))
            if each is not None and len(known):
                ends[known] = each.walk(known, places[known], None)
                status[known] = _KNOWN
                nodes.append((each, known))
        if query.within is not None:
            by_threads |= self._beyond(places, ends, status, is_over)
        status[by_threads] = _ASK
        return places, status, ends, nodes

    def _over(self) -> Flags:
        """Return, for each row, whether all rows within its time have come: by the watermark, or by a later row."""
        board = self._board
        assert board.times is not None
        until = board.times + within_units(self._query)
        newest = board.times[np.append(board.starts[1:], board.rows) - 1][board.partition_of_row]
        over: Flags = newest > until
        if self._watermark is not None:
            over |= until < self._watermark
        return over

    def _beyond(self, places: Places, ends: Places, status: npt.NDArray[np.int8], is_over: Flags) -> Flags:
        """Return the mask of known matches that WITHIN or an absent row forbids: threads look for others there."""
        board, query = self._board, self._query
        assert board.times is not None
        partitions = board.partition_of(places)
        starts, until = places - partitions, board.times[places - partitions] + within_units(query)
        known = status == _KNOWN
        last = np.maximum(ends - partitions - 1, starts)
        beyond = known & (board.times[last] > until)
        if self._absent is not None:
            following = next_true(board.padded(self._masks[self._absent]))[ends]
            inside = following < board.last[partitions]
            rows = np.where(inside, following - partitions, starts)
            beyond |= known & inside & (board.times[rows] <= until)
            # No such row has come yet. Whether one comes is known when its time is over.
            status[known & ~beyond & board.open[partitions] & ~is_over] = _WAIT
        return beyond

    def _threads(self) -> Threads:
        if self._made is None:
            memory = Memory(self._names, self._rows.plain, self._rows.kind)
            conditions = {self._names.index(name): memory.condition(each) for name, each in self._rest.items()}
            possible = {self._names.index(name): mask.tolist() for name, mask in self._masks.items()}
            self._made = Threads(compiled(self._query.pattern, self._names), memory, possible, conditions)
        return self._made

    def _span(self, row: int, partition: int) -> Span:
        begin, end = int(self._board.starts[partition]), self._ends[partition]
        limit, is_open = end, bool(self._board.open[partition])
        if self._query.within is not None:
            times = self._board.times
            assert times is not None
            until = int(times[row]) + within_units(self._query)
            limit = begin + bisect_right(times[begin:end], until)
            is_open &= limit == end and (self._watermark is None or until >= self._watermark)
        return Span(begin, end, limit, is_open)

    def _take(
        self, places: Places, status: npt.NDArray[np.int8], ends: Places, nodes: Sequence[tuple[Node, Places]]
    ) -> Found:
        board, query = self._board, self._query
        partitions = board.partition_of(places)
        targets = self._targets(places, ends, nodes) if query.skip in ("to first", "to last") else None
        undecided = np.append(board.starts[1:], board.rows)
        to_next = query.skip == "to next row"
        taken: list[int] = []
        asked: dict[int, list[tuple[int, bool]]] = {}
        free, counted, counts = 0, -1, 0
        listed = zip(
            (places - partitions).tolist(),
            status.tolist(),
            (ends - partitions).tolist(),
            partitions.tolist(),
            strict=True,
        )
        for place, (row, state, end, partition) in enumerate(listed):
            if row < free:
                continue
            if state == _WAIT:
                undecided[partition] = row
                free = self._ends[partition]
                continue
            if partition != counted:
                counted, counts = partition, int(self._base[partition])
            if state == _ASK:
                answer = self._threads().find(row, self._span(row, partition), counts + 1)
                if answer is None:
                    continue
                if isinstance(answer, bool):
                    undecided[partition] = row
                    free = self._ends[partition]
                    continue
                asked[place] = answer
                end = row + len(answer)
            counts += 1
            taken.append(place)
            if end == row or to_next:
                free = row + 1
            elif query.skip == "past last row":
                free = end
            else:
                target = (
                    self._target(row, asked[place]) if place in asked else targets[place] if targets is not None else -1
                )
                if target < 0:
                    raise InvalidArgument(
                        f"AFTER MATCH SKIP TO {query.skip_to}: the match has no row of {query.skip_to}"
                    )
                if target == row:
                    raise InvalidArgument(
                        f"AFTER MATCH SKIP TO {query.skip_to}: that is the match's first row, which never ends"
                    )
                free = int(target)
        return Found(self._matches(places, ends, nodes, np.array(taken, dtype=np.int64), asked), undecided)

    def _target(self, row: int, labels: Sequence[tuple[int, bool]]) -> int:
        wanted = {self._names.index(each) for each in self._query.skip_variables}
        found = [place for place, (code, _) in enumerate(labels) if code in wanted]
        return -1 if not found else row + (found[0] if self._query.skip == "to first" else found[-1])

    def _targets(self, places: Places, ends: Places, nodes: Sequence[tuple[Node, Places]]) -> list[int]:
        """Return for each known candidate the row to skip to, or -1 if its match has none."""
        found = np.full(len(places), -1, dtype=np.int64)
        wanted = [self._names.index(each) for each in self._query.skip_variables]
        for node, known in nodes:
            matches = self._matches(places, ends, [(node, known)], known, {})
            members = np.flatnonzero(np.isin(matches.codes, wanted))
            of = np.searchsorted(matches.offsets, members, side="right") - 1
            if self._query.skip == "to first":
                members, of = members[::-1], of[::-1]
            found[known[of]] = matches.rows[members]  # the last one assigned stays
        return found.tolist()

    def _matches(
        self,
        places: Places,
        ends: Places,
        nodes: Sequence[tuple[Node, Places]],
        taken: Places,
        asked: dict[int, list[tuple[int, bool]]],
    ) -> Matches:
        """Return the matches of the candidates `taken` (ascending indices), with each row's code."""
        board = self._board
        lengths = (ends - places)[taken]
        order = {int(place): number for number, place in enumerate(taken)} if asked else {}
        for place, labels in asked.items():
            lengths[order[place]] = len(labels)
        offsets = np.append(0, np.cumsum(lengths))
        codes = np.zeros(int(offsets[-1]), dtype=np.int16)
        excluded = np.zeros(int(offsets[-1]), dtype=np.bool_)
        starts = places[taken]
        by_threads = np.isin(taken, np.fromiter(asked, dtype=np.int64, count=len(asked)))
        for node, known in nodes:
            mine = np.flatnonzero(np.isin(taken, known, assume_unique=True) & ~by_threads)
            traces = Traces()
            node.walk(mine, starts[mine], traces)
            for matches, begins, stops, code, leaves_out in traces.stretches:
                spans = stops - begins
                inside = np.arange(int(spans.sum())) - np.repeat(np.cumsum(spans) - spans, spans)
                at = np.repeat(offsets[matches] + begins - starts[matches], spans) + inside
                codes[at] = code if isinstance(code, int) else code[np.repeat(begins, spans) + inside]
                if leaves_out:
                    excluded[at] = True
        for place, labels in asked.items():
            at_first = int(offsets[order[place]])
            codes[at_first : at_first + len(labels)] = [code for code, _ in labels]
            excluded[at_first : at_first + len(labels)] = [flag for _, flag in labels]
        partitions = board.partition_of(starts)
        return Matches(starts - partitions, offsets, codes, excluded, self._numbers(partitions))

    def _numbers(self, partitions: Places) -> Places:
        first = np.searchsorted(partitions, partitions)
        return self._base[partitions] + np.arange(len(partitions)) - first + 1
