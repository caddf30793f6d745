"""Parse the values and conditions of a schema: predicates whose operands may be computed.

    qty * price                       round(net * 0.19, 2)          coalesce(nick, name, '?')
    CASE WHEN qty < 0 THEN 0 ELSE qty END          cast(at AS date)          first || ' ' || last

Adds to :mod:`millrace.base.predicate.language`: ``+ - * / %``, ``||``, a sign, functions by name (listed in
:mod:`millrace.message.expression.tree`), ``CASE WHEN … THEN … ELSE … END``, ``CAST(… AS …)`` and ``NULL`` as a value.
"""

from __future__ import annotations

from typing import Any, Final

from millrace.base.predicate.language import FunctionCall, Like, Literal, Parser

SUM: Final = {"+": "+", "-": "-", "||": "||"}
PRODUCT: Final = {"*": "*", "/": "/", "%": "%"}


def parse_scalar_expression(text: str) -> Any:
    """Parse `text` as a value or condition.

    Raises InvalidArgument with the problem and its position.
    """
    return _ValueParser(text).parse()


class _ValueParser(Parser):
    def _value(self) -> Any:
        return self._row_of(SUM, lambda: self._row_of(PRODUCT, self._signed))

    def _row_of(self, marks: dict[str, str], part: Any) -> Any:
        found = part()
        while (name := marks.get(self._now.word)) is not None:
            self._at += 1
            right = part()
            if name == "||" and isinstance(found, FunctionCall) and found.name == "||":
                found = FunctionCall("||", (*found.args, right))
            else:
                found = FunctionCall(name, (found, right))
        return found

    def _signed(self) -> Any:
        negative = False
        while self._now.word in ("-", "+"):
            negative ^= self._now.word == "-"
            self._at += 1
        found = self._primary()
        if not negative:
            return found
        if isinstance(found, Literal) and not isinstance(found.value, bool | str | bytes):
            return Literal(-found.value)
        return FunctionCall("neg", (found,))

    def _operand(self, found: Any) -> Any:
        return found

    def _like(self, left: Any) -> Any:
        return Like(left, self._pattern())

    def _primary(self) -> Any:
        token = self._now
        if token.kind == "mark" and token.word in ("-", "+"):
            return self._signed()
        if token.kind == "name" and not token.text.startswith("`"):
            match token.word:
                case "null" | "none":
                    self._at += 1
                    return FunctionCall("null")
                case "case":
                    self._at += 1
                    return self._case()
                case word if word not in ("not", "in", "and", "or", "like") and self._next_is("("):
                    self._at += 2
                    return self._cast() if word == "cast" else FunctionCall(word, self._arguments())
        return super()._primary()

    def _next_is(self, mark: str) -> bool:
        return self._tokens[min(self._at + 1, len(self._tokens) - 1)].word == mark

    def _arguments(self) -> tuple[Any, ...]:
        found: list[Any] = []
        while not self._take(")"):
            found.append(self._some())
            if not self._take(",") and self._now.word != ")":
                raise self._wrong("expected a comma or )")
        return tuple(found)

    def _case(self) -> FunctionCall:
        found: list[Any] = []
        while self._take("when"):
            found.append(self._some())
            if not self._take("then"):
                raise self._wrong("expected THEN")
            found.append(self._some())
        if not found:
            raise self._wrong("expected WHEN")
        found.append(self._some() if self._take("else") else FunctionCall("null"))
        if not self._take("end"):
            raise self._wrong("expected WHEN, ELSE or END")
        return FunctionCall("case", tuple(found))

    def _cast(self) -> FunctionCall:
        found = self._some()
        if not self._take("as") or self._now.kind != "name":
            raise self._wrong("expected AS and a type")
        kind = self._now.text.lower()
        self._at += 1
        if self._take("("):
            parts = []
            while not self._take(")"):
                if self._now.kind != "number" and self._now.word != ",":
                    raise self._wrong("expected a type")
                parts.append(self._now.text)
                self._at += 1
            kind += f"({''.join(parts)})"
        if not self._take(")"):
            raise self._wrong("expected )")
        return FunctionCall("cast", (found,), kind)
