"""Format trees as text that people read, and that parses to the same tree."""

from __future__ import annotations

import re
from typing import Final

from millrace.base.predicate.language import RESERVED
from millrace.message.expression.tree import COMPARISONS, Node

_BARE: Final = re.compile(r"[^\W\d]\w*")
_WORDS: Final = RESERVED | {"case", "when", "then", "else", "end", "cast", "as", "date", "timestamp"}
_INFIX: Final = frozenset({*COMPARISONS, "+", "-", "*", "/", "%"})


def format_expression(node: Node) -> str:
    """Return `node` as text."""
    text = _shown(node)
    return (
        text[1:-1] if text.startswith("(") and node.op in (*_INFIX, "and", "or", "not", "||", "is_null", "in") else text
    )


def _shown(node: Node) -> str:
    args = [_shown(each) for each in node.args]
    match node.op:
        case "field":
            return ".".join(_name(each) for each in node.params)
        case "literal":
            return _literal(*node.params)
        case "null":
            return "NULL"
        case "now":
            return "now()"
        case "and" | "or":
            return f"({f' {node.op.upper()} '.join(args)})"
        case "not":
            return f"(NOT {args[0]})"
        case "is_null":
            return f"({args[0]} IS NULL)"
        case "in":
            return f"({args[0]} IN ({', '.join(args[1:])}))"
        case "||":
            return f"({' || '.join(args)})"
        case "neg":
            return f"(-{args[0]})"
        case "case":
            arms = "".join(f" WHEN {when} THEN {then}" for when, then in zip(args[:-1:2], args[1::2], strict=True))
            return f"CASE{arms} ELSE {args[-1]} END"
        case "cast":
            return f"cast({args[0]} AS {node.kind})"
        case _ if node.op in _INFIX:
            return f"({args[0]} {node.op} {args[1]})"
    return f"{node.op}({', '.join([*args, *node.params])})"


def _name(name: str) -> str:
    return name if _BARE.fullmatch(name) and name.lower() not in _WORDS else f"`{name.replace('`', '``')}`"


def _literal(kind: str, text: str) -> str:
    if kind == "binary":
        return repr(bytes.fromhex(text))
    if kind in ("string", "date", "timestamp", "timestamp_ntz"):
        return "'" + text.replace("'", "''") + "'"
    return text
