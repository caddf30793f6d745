"""What a declaration takes from others, and whether its writer may: collections, somebody else's account, old secrets.

A pipeline's worker has the rights of its machine. So a declaration may only read and write what its writer may.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from millrace.access.grants import Caller, Resource, ResourceKind, Role
from millrace.base.errors import PermissionDenied
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.steps import Lookup
from millrace.flows.sinks.collection.model import CollectionSink
from millrace.flows.sources.collection.model import CollectionSource
from millrace.pipelines.declaration import as_pipeline

_HOME: Final = ("bootstrap", "hosts")
"""Fields that say where secrets beside them are sent."""
_TRUST: Final = ("protocol", "mechanism", "ca")
"""Fields that say how, and to whom."""


def sees(caller: Caller, pipeline: str) -> bool:
    """Whether he may know that there is such a pipeline."""
    return caller.principal.has_role((Role.READ,), (Resource(ResourceKind.PIPELINE, pipeline),))


def may_declare(caller: Caller, asked: Flow, *, was: Flow | None = None) -> None:
    """Raise PermissionDenied for a collection that the caller may not read or write, and for somebody else's account.

    What was in the declaration `was` already stays allowed.
    """
    known = set() if was is None else set(_taken(was))
    for role, collection in _taken(asked):
        if (role, collection) not in known:
            caller.principal.require_role(
                (role,), (Resource(ResourceKind.COLLECTION, collection),), f"pipeline {asked.name}"
            )
    kept = was is not None and was.account == asked.account
    everybody = (Resource(ResourceKind.PIPELINE, "*"),)
    if not kept and asked.account != caller.principal.name and not caller.principal.has_role((Role.ADMIN,), everybody):
        raise PermissionDenied(
            f"the account {asked.account!r} is not yours: omit it, or ask somebody with the role admin on pipeline:*"
        )


def may_look_up(caller: Caller, asked: Flow) -> None:
    """Raises PermissionDenied for a collection that its lookups would show to the caller, who may not read it."""
    for step in asked.transform.steps:
        if isinstance(step, Lookup):
            caller.principal.require_role(
                (Role.READ,), (Resource(ResourceKind.COLLECTION, step.collection),), "a dry run"
            )


def _taken(pipeline: Flow) -> Iterator[tuple[Role, str]]:
    if isinstance(pipeline.source, CollectionSource):
        yield Role.READ, pipeline.source.collection
    if isinstance(pipeline.sink, CollectionSink):
        yield Role.PRODUCE, pipeline.sink.collection
    if pipeline.errors.collection is not None:
        yield Role.OPERATE if pipeline.errors.create else Role.PRODUCE, pipeline.errors.collection
    for step in pipeline.transform.steps:
        if isinstance(step, Lookup):
            yield Role.READ, step.collection


def kept_secrets(was: Flow, declared: Any) -> dict[str, str]:
    """Return the secrets of `was` that remain valid under `declared`.

    A part with another address, or another certificate authority, keeps none: otherwise whoever may change a pipeline
    could read its secrets.
    """
    found = {}
    before = as_pipeline(was)
    for path, text in was.secrets().items():
        part = path.split(".")[0]
        old, new = before.get(part), declared.get(part) if isinstance(declared, dict) else None
        if part == "errors":
            old, new = (each.get("cluster") if isinstance(each, dict) else None for each in (old, new))
        if isinstance(old, dict) and isinstance(new, dict) and _one_place(old, new):
            found[path] = text
    return found


def _one_place(old: dict[str, Any], new: dict[str, Any]) -> bool:
    here, there = (each.get("security") for each in (old, new))
    trust = all(
        (new.get(name) or None) == (old.get(name) or None) for name in _TRUST if name in old or name in new
    ) and (
        there is None
        or (
            isinstance(here, dict)
            and isinstance(there, dict)
            and all(here.get(n) == there.get(n, here.get(n)) for n in _TRUST)
        )
    )
    return trust and all(_same(old, new, name) for name in _HOME)


def _same(old: dict[str, Any], new: dict[str, Any], name: str) -> bool:
    return list(old.get(name, ())) == (
        list(new[name])
        if isinstance(new.get(name), list | tuple)
        else list(old.get(name, ()))
        if name not in new
        else None
    )
