"""What MATCH_RECOGNIZE means, naively: one partition after the other, row by row, backtracking in order of preference.

It takes the parsed query and shares with the matchers the parts of patterns and expressions alone. Conditions and
measures are computed from the list of labels each time anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from millrace.base.errors import InvalidArgument
from millrace.streams.patterns import expressions as ex
from millrace.streams.patterns import pattern as pt
from millrace.streams.patterns.query import MatchRecognize

Row = dict[str, Any]
Labels = tuple[tuple[str, bool], ...]


class Model:
    def __init__(self, query: MatchRecognize, rows: list[Row]) -> None:
        self.query = query
        partitions: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            partitions.setdefault(tuple(row[name] for name in query.partition), []).append(row)
        for each in partitions.values():
            for order in reversed(query.order):
                each.sort(key=lambda row: row[order.column], reverse=order.descending)
        self.partitions = list(partitions.values())

    def answer(self) -> list[Row]:
        found: list[Row] = []
        for rows in self.partitions:
            found += self._partition(rows)
        return found

    def matches(self, rows: list[Row]) -> Iterator[tuple[int, Labels | None]]:
        """Each start that was tried, with its match."""
        query, start, number = self.query, 0, 0
        while start < len(rows):
            labels = self._match(rows, start, number + 1)
            yield start, labels
            if labels is None:
                start += 1
                continue
            number += 1
            if not labels or query.skip == "to next row":
                start += 1
            elif query.skip == "past last row":
                start += len(labels)
            else:
                wanted = query.skip_variables
                places = [place for place, (label, _) in enumerate(labels) if label in wanted]
                if not places:
                    raise InvalidArgument("no such row")
                target = places[0] if query.skip == "to first" else places[-1]
                if target == 0:
                    raise InvalidArgument("the first row")
                start += target

    def _partition(self, rows: list[Row]) -> list[Row]:
        query, found, number, covered = self.query, [], 0, -1
        for start, labels in self.matches(rows):
            if labels is None:
                if query.rows == "all with unmatched" and start > covered:
                    found.append(self._row(rows, start, None, 0, 0, 0))
                continue
            number += 1
            covered = max(covered, start + len(labels) - 1)
            if query.rows == "one":
                found.append(self._row(rows, start, labels, start, len(labels), number))
            elif labels:
                for place, (_, excluded) in enumerate(labels):
                    if not excluded:
                        found.append(self._row(rows, start + place, labels, start, place + 1, number))
            elif query.rows != "all omit empty":
                found.append(self._row(rows, start, labels, start, 0, number))
        return found

    def _row(self, rows: list[Row], at: int, labels: Labels | None, start: int, seen: int, number: int) -> Row:
        query = self.query
        row = {name: rows[at][name] for name in query.partition}
        if query.rows != "one":
            row |= rows[at]
        for name, measure in query.measures.items():
            row[name] = None if labels is None else self._value(measure, rows, labels, start, seen, number)
        return row

    def _match(self, rows: list[Row], start: int, number: int) -> Labels | None:
        for labels in self._ways(self.query.pattern, rows, start, (), number, frozenset()):
            return labels
        return None

    def _ways(
        self, pattern: pt.Pattern, rows: list[Row], start: int, labels: Labels, number: int, excluded: frozenset[bool]
    ) -> Iterator[Labels]:
        again = self._ways
        at = start + len(labels)
        match pattern:
            case pt.Variable(name):
                if at < len(rows) and self._within(rows, start, at):
                    longer = (*labels, (name, bool(excluded)))
                    condition = self.query.define.get(name)
                    if condition is None or self._value(condition, rows, longer, start, len(longer), number) is True:
                        yield longer
            case pt.Sequence(parts):
                if not parts:
                    yield labels
                    return
                for first in again(parts[0], rows, start, labels, number, excluded):
                    yield from again(pt.Sequence(parts[1:]), rows, start, first, number, excluded)
            case pt.Alternation(choices):
                for each in choices:
                    yield from again(each, rows, start, labels, number, excluded)
            case pt.Repeated():
                yield from self._repeated(pattern, rows, start, labels, number, excluded)
            case pt.Excluded(body):
                yield from again(body, rows, start, labels, number, frozenset({True}))
            case pt.Anchor(side):
                if at == (0 if side == "start" else len(rows)):
                    yield labels
            case pt.Nothing():
                yield labels
            case pt.Absent(name):
                if not self._comes(name, rows, start, labels, number):
                    yield labels

    def _repeated(
        self, pattern: pt.Repeated, rows: list[Row], start: int, labels: Labels, number: int, excluded: frozenset[bool]
    ) -> Iterator[Labels]:
        body, least, most, greedy = pattern.body, pattern.least, pattern.most, pattern.greedy
        rest = pt.Repeated(body, max(least - 1, 0), None if most is None else most - 1, greedy)
        if not least and not greedy:
            yield labels
        if least or most is None or most > 0:
            for first in self._ways(body, rows, start, labels, number, excluded):
                if least or most is not None or len(first) > len(labels):  # an endless repetition of nothing is none
                    yield from self._ways(rest, rows, start, first, number, excluded)
        if not least and greedy:
            yield labels

    def _comes(self, name: str, rows: list[Row], start: int, labels: Labels, number: int) -> bool:
        """Whether a later row within the time would be a `name`, each tried as the row behind what
        was matched, at its own place.
        """
        for later in range(start + len(labels), len(rows)):
            tried = (*labels, *[("", False)] * (later - start - len(labels)), (name, False))
            if self._within(rows, start, later):
                condition = self.query.define[name]
                if self._value(condition, rows, tried, start, len(tried), number) is True:
                    return True
        return False

    def _within(self, rows: list[Row], start: int, at: int) -> bool:
        within, column = self.query.within, self.query.order[0].column
        return within is None or bool(rows[at][column] - rows[start][column] <= within)

    def _value(self, expression: Any, rows: list[Row], labels: Labels, start: int, seen: int, number: int) -> Any:
        def value(each: Any) -> Any:
            return self._value(each, rows, labels, start, seen, number)

        match expression:
            case ex.Constant(constant):
                return constant
            case ex.MatchNumber():
                return number
            case ex.Call(name, arguments, _):
                return _called(name, [value(each) for each in arguments])
            case ex.Aggregate(function, row, names, final):
                there = [
                    (start + place, label)
                    for place, (label, _) in enumerate(labels if final else labels[:seen])
                    if label and (not names or label in names)
                ]
                if row is None:
                    return len(there)
                values = [self._of_row(row, rows[place], label) for place, label in there]
                return _aggregated(function, values)
            case ex.Reach(row, names, first, offset, shift, final):
                there_ = [
                    place
                    for place, (label, _) in enumerate(labels if final else labels[:seen])
                    if label and (not names or label in names)
                ]
                if len(there_) <= offset:
                    return None
                place = there_[offset] if first else there_[-1 - offset]
                place += shift
                if not 0 <= start + place < len(rows):
                    return None
                label = labels[place][0] if 0 <= place < len(labels) else None
                return self._of_row(row, rows[start + place], label)
        raise AssertionError(expression)

    def _of_row(self, expression: Any, row: Row, label: str | None) -> Any:
        match expression:
            case ex.Constant(constant):
                return constant
            case ex.Column(name):
                return row[name]
            case ex.Classifier():
                return label
            case ex.Call(name, arguments, _):
                return _called(name, [self._of_row(each, row, label) for each in arguments])
        raise AssertionError(expression)


def _aggregated(function: str, values: list[Any]) -> Any:
    if function == "array_agg":
        return values
    known = [each for each in values if each is not None]
    if function == "count":
        return len(known)
    if not known:
        return None
    return {"sum": sum, "min": min, "max": max, "avg": lambda each: sum(each) / len(each)}[function](known)  # type: ignore[operator]


def _called(name: str, values: list[Any]) -> Any:
    if name == "and":
        return False if False in values else None if None in values else True
    if name == "or":
        return True if True in values else None if None in values else False
    if name == "is null":
        return values[0] is None
    if name == "coalesce":
        return next((each for each in values if each is not None), None)
    if None in values:
        return None
    left = values[0]
    right = values[1] if len(values) > 1 else None
    match name:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return left / right if right else None
        case "=":
            return left == right
        case "<>":
            return left != right
        case "<":
            return left < right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case ">=":
            return left >= right
        case "not":
            return not left
        case "||":
            return left + right
    raise AssertionError(name)


__all__ = ["Model", "timedelta"]
