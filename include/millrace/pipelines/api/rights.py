"""Checks whether a user may declare what a pipeline uses: collections, another user's account, stored secrets.

A pipeline's worker has the rights of its machine. So a declaration may read and write only what its author may.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from millrace.access.grants import Caller, Resource, ResourceKind, Role
from millrace.base.errors import PermissionDenied
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.part import Part
from millrace.flows.declare.steps import Lookup
from millrace.flows.sinks.collection.model import CollectionSink
from millrace.flows.sources.collection.model import CollectionSource

_PLACES: Final = (
    "kind", "bootstrap", "hosts", "host", "port", "url", "engine", "endpoint", "address",
    "protocol", "mechanism", "ca", "tls", "tls_ca",
)  # fmt: skip
"""Fields that decide where secrets next to them, or below them, are sent, how, and to whom."""


def sees(caller: Caller, pipeline: str) -> bool:
    """Return whether the caller may know that the pipeline exists."""
    return caller.principal.has_role((Role.READ,), (Resource(ResourceKind.PIPELINE, pipeline),))


def may_declare(caller: Caller, asked: Flow, *, was: Flow | None = None) -> None:
    """Raise PermissionDenied for a collection that the caller may not read or write, and for another user's account.

    Parts that the declaration `was` already had stay allowed.
    """
    known = set() if was is None else set(_taken(was))
    for role, collection in _taken(asked):
        if (role, collection) not in known:
            caller.principal.require_role(
                (role,), (Resource(ResourceKind.COLLECTION, collection),), f"pipeline {asked.name}"
            )
    same_account = was is not None and was.account == asked.account
    everybody = (Resource(ResourceKind.PIPELINE, "*"),)
    if (
        not same_account
        and asked.account != caller.principal.name
        and not caller.principal.has_role((Role.ADMIN,), everybody)
    ):
        raise PermissionDenied(
            f"the account {asked.account!r} is not yours: omit it, or ask a user with the role admin on pipeline:*"
        )


def may_look_up(caller: Caller, asked: Flow) -> None:
    """Raise PermissionDenied for a collection that lookups would show to a caller who may not read it."""
    for step in asked.transform.steps:
        if isinstance(step, Lookup):
            caller.principal.require_role(
                (Role.READ,), (Resource(ResourceKind.COLLECTION, step.collection),), "a dry run"
            )


def _taken(pipeline: Flow) -> Iterator[tuple[Role, str]]:
    if isinstance(pipeline.source, CollectionSource):
        yield Role.READ, pipeline.source.collection
    if isinstance(pipeline.sink, CollectionSink):
        shapes = pipeline.sink.create or pipeline.sink.on_schema_change == "alter"
        yield Role.OPERATE if shapes else Role.PRODUCE, pipeline.sink.collection
    if pipeline.errors.collection is not None:
        yield Role.OPERATE if pipeline.errors.create else Role.PRODUCE, pipeline.errors.collection
    for step in pipeline.transform.steps:
        if isinstance(step, Lookup):
            yield Role.READ, step.collection


def retained_secrets(was: Flow, declared: Any) -> dict[str, str]:
    """Return the secrets of `was` that remain valid under `declared`.

    A part with another address, or another certificate authority, retains none: otherwise a user who may change a
    pipeline could read its secrets.
    """
    return {path: text for path, text in was.secrets().items() if _one_place(was, declared, path.split(".")[:-1])}


def _one_place(part: Any, new: Any, path: list[str]) -> bool:
    """Return whether the parts along `path` that contain a secret still have the same addresses."""
    for name in path:
        part, new = getattr(part, name, None), new.get(name) if isinstance(new, dict) else None
        if not isinstance(part, Part) or not isinstance(new, dict):
            return False
        for each, field in type(part).model_fields.items():
            if each in _PLACES:
                asked = new.get(each, field.get_default(call_default_factory=True))
                if getattr(part, each) != (tuple(asked) if isinstance(asked, list) else asked):
                    return False
    return True
