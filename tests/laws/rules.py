"""Checks, defaults and computed fields in the reference model.

The few forms that drawn logs have, judged row by row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from millrace.wal.reasons import Reason
from tests.laws.parts import Batch, Refused

INTS = ("int32", "int64")
FACTOR = 2


@dataclass(frozen=True)
class Rules:
    """Of one version of a schema. Fields keep a number for ever, by which versions know each other's."""

    numbers: dict[str, int] = field(default_factory=dict)
    given: int = 0
    defaults: dict[str, int] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)
    """By field the one that it is twice of."""
    checks: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By name a field, and what it is less than."""

    def with_field(self, name: str) -> Rules:
        return replace(self, numbers=self.numbers | {name: self.given}, given=self.given + 1)


def less_than(name: str, limit: int) -> list[list[Any]]:
    """The condition of a check."""
    return [["field", name], ["literal", "int64", str(limit)], ["<"]]


def twice(name: str) -> list[list[Any]]:
    """What a field is computed to be."""
    return [["field", name], ["literal", "int64", str(FACTOR)], ["*"]]


def first_rules(schema: dict[str, Any]) -> Rules:
    """The rules of a new collection's schema; ValueError, KeyError or TypeError where it has none of these forms."""
    rules, kinds = Rules(), {}
    for spec in schema["fields"]:
        rules, kinds[spec["name"]] = rules.with_field(spec["name"]), spec["type"]
    for spec in schema["fields"]:
        rules = _with_rules_of(spec, rules, kinds)
    if schema.get("checks", [0]) == []:
        raise ValueError
    for check in schema.get("checks", []):
        rules = _with_check(check["name"], check["condition"], rules, kinds)
    return rules


def _with_rules_of(spec: dict[str, Any], rules: Rules, kinds: dict[str, str]) -> Rules:
    name = spec["name"]
    if "computed" in spec:
        [_, of], *_ = spec["computed"]
        stored = {each for each in kinds if each not in rules.computed} - {name}
        if spec["computed"] != twice(of) or kinds[of] not in INTS or kinds[name] not in INTS or of not in stored:
            raise ValueError
        rules = replace(rules, computed=rules.computed | {name: of})
    if "default" in spec:
        rules = _with_default(name, spec["default"], rules, kinds)
    return rules


def _with_default(name: str, default: Any, rules: Rules, kinds: dict[str, str]) -> Rules:
    [[op, kind, text]] = default
    if (op, kind) != ("literal", "int64") or kinds[name] not in INTS or name in rules.computed:
        raise ValueError
    return replace(rules, defaults=rules.defaults | {name: int(text)})


def _with_check(name: str, condition: Any, rules: Rules, kinds: dict[str, str]) -> Rules:
    [[_, of], [_, _, limit], _] = condition
    if condition != less_than(of, int(limit)) or kinds[of] not in INTS or name in rules.checks:
        raise ValueError
    return replace(rules, checks=rules.checks | {name: (of, int(limit))})


def ruled(rules: Rules, kinds: dict[str, str], change: dict[str, Any]) -> Rules:
    """The rules after one change, which the fields before it (`kinds`: their types) allow. Refuses what they do not."""
    try:
        return _ruled(rules, kinds, change)
    except (KeyError, TypeError, ValueError):
        raise Refused(Reason.SCHEMA_MISMATCH, "rule") from None


def _ruled(rules: Rules, kinds: dict[str, str], change: dict[str, Any]) -> Rules:
    used = {of for of, _ in rules.checks.values()} | set(rules.computed.values())
    match change:
        case {"op": "add", "field": spec}:
            return _with_rules_of(spec, rules.with_field(spec["name"]), kinds | {spec["name"]: spec["type"]})
        case {"op": "drop", "name": name}:
            if name in used:
                raise ValueError
            kept = {each: value for each, value in rules.numbers.items() if each != name}
            return replace(
                rules,
                numbers=kept,
                defaults={each: value for each, value in rules.defaults.items() if each != name},
                computed={each: value for each, value in rules.computed.items() if each != name},
            )
        case {"op": "rename", "name": name, "to": to}:

            def new(each: str) -> str:
                return to if each == name else each

            return Rules(
                {new(each): value for each, value in rules.numbers.items()},
                rules.given,
                {new(each): value for each, value in rules.defaults.items()},
                {new(each): new(of) for each, of in rules.computed.items()},
                {each: (new(of), limit) for each, (of, limit) in rules.checks.items()},
            )
        case {"op": "set_default", "name": name, "default": default}:
            return _with_default(name, default, rules, kinds)
        case {"op": "drop_default", "name": name}:
            rules.defaults[name]
            return replace(rules, defaults={each: value for each, value in rules.defaults.items() if each != name})
        case {"op": "add_check", "name": name, "condition": condition}:
            return _with_check(name, condition, rules, kinds)
        case {"op": "drop_check", "name": name}:
            rules.checks[name]
            return replace(rules, checks={each: value for each, value in rules.checks.items() if each != name})
    return rules


def judge(batch: Batch, written: Rules, newest: Rules) -> None:
    """Refuses rows of one version that do not hold to the rules of the newest."""
    names = {number: name for name, number in written.numbers.items()}

    def value(row: int, name: str) -> int | None:
        there = names.get(newest.numbers[name])
        if there is not None:
            number: int = batch.numbers[row]
            if there not in written.computed:
                return number
            return FACTOR * number if batch.computed_as is None else batch.computed_as
        if name in newest.computed:
            of = value(row, newest.computed[name])
            return None if of is None else FACTOR * of
        return newest.defaults.get(name)

    for row in range(batch.rows):
        for of, limit in newest.checks.values():
            found = value(row, of)
            if found is not None and found >= limit:
                raise Refused(Reason.CHECK_VIOLATED)
        for name, of in newest.computed.items():
            base = value(row, of)
            if value(row, name) != (None if base is None else FACTOR * base):
                raise Refused(Reason.CHECK_VIOLATED)


def ruling(rules: Rules, version: int, narrow: str, key: str) -> list[list[dict[str, Any]]]:
    """Changes of checks, defaults and computed fields: some that can be, and some that cannot."""
    check = {"op": "add_check", "name": f"check{version}", "condition": less_than(key, 20)}
    added = {"name": f"more{version}", "type": "int64", "nullable": True}
    filled = {"op": "add", "field": added | {"default": [["literal", "int64", "50"]]}}
    computed = {"op": "add", "field": added | {"computed": twice(key)}}
    default = {"op": "set_default", "default": [["literal", "int64", "9"]]}
    return [
        [check],
        [filled, check | {"condition": less_than(f"more{version}", 60)}],
        [computed, check | {"condition": less_than(f"more{version}", 50)}],
        [
            filled,
            check | {"condition": less_than(f"more{version}", 10)},
            {"op": "drop_default", "name": f"more{version}"},
        ],
        [filled, default | {"name": f"more{version}"}] if version % 2 == 0 else [default | {"name": narrow}],
        [{"op": "drop_check", "name": next(reversed(rules.checks), "nothing")}],
        [{"op": "drop_default", "name": next(iter(rules.defaults), "nothing")}],
        [check | {"condition": less_than("nothing", 1)}],
        [check | {"condition": [["field", key]]}],
        [{"op": "add", "field": added | {"computed": twice(next(iter(rules.computed), "nothing"))}}],
        [
            check,
            {"op": "rename", "name": key, "to": f"key{version}"},
            {"op": "drop_check", "name": f"check{version}"},
        ],
    ]
