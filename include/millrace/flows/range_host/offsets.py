"""Set a stopped flow's positions by hand, for the management service and the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millrace.base.errors import InvalidArgument, PipelineBusy
from millrace.base.settings import Settings
from millrace.coord.clock import SystemClock
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.definition import places_of, runs_alone
from millrace.flows.range_host.positions import change_positions
from millrace.flows.sources.division import members as leased
from millrace.flows.sources.division import open_store
from millrace.flows.sources.kafka.membership import members
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.source import Source
from millrace.message.ids import resolve_tick, tick_physical_ms


def require_no_members(settings: Settings, flow: Flow) -> None:
    """Raise PipelineBusy if workers of any machine hold the flow's lanes, by its consumer group or by leases."""
    alone = runs_alone(settings, flow)
    if not flow.divided and not alone:
        return
    if alone or not isinstance(flow.source, KafkaSource):
        with open_store(settings, SystemClock()) as store:
            workers = leased(store, flow.name)
        if workers:
            raise PipelineBusy(
                f"{flow.name!r} has workers with a lease ({', '.join(workers)}): stop them on every machine, and"
                f" wait for the end of their lease ({settings.session_seconds:g} s)"
            )
        return
    found = members(flow.source, flow.consumer_group)
    if found:
        hosts = ", ".join(sorted(set(found.values())))
        session = flow.source.session_timeout_ms / 1000
        raise PipelineBusy(
            f"{flow.name!r} has workers in the consumer group {flow.consumer_group} ({hosts}): stop them on"
            f" every machine, and wait for the end of their session ({session:g} s)"
        )


def require_tasks(flow: Flow, offsets: Mapping[str, int]) -> None:
    """Raise InvalidArgument unless each of `offsets` names a partition of the flow's topics."""
    source = flow.source
    for task in offsets:
        topic, _, partition = task.rpartition("-")
        if not isinstance(source, KafkaSource):
            raise InvalidArgument(f"{flow.name!r} has no topics")
        if not source.reads(topic) or not (partition.isascii() and partition.isdigit() and len(partition) < 7):
            example = source.topics[0] if source.topics else "flights"
            raise InvalidArgument(
                f"{task[:300]!r} is not a task of {flow.name!r}: write a topic and a partition, such as {example}-0"
            )


def offsets_at(
    settings: Settings, flow: Flow, to: str, *, places: Callable[[Settings, Flow], Source] | None = None
) -> dict[str, int]:
    """Return, by task, the offset of ``earliest``, ``latest``, or the first record of a moment (ISO 8601, a time tick).

    Raises LogUnavailable, InvalidArgument.
    """
    at = None if to in ("earliest", "latest") else tick_physical_ms(resolve_tick(to))
    source = (places or places_of)(settings, flow)
    try:
        if at is not None:
            return source.at(at)
        return {task: ends.low if to == "earliest" else ends.high for task, ends in source.ends().items()}
    finally:
        source.close()


def set_offsets(settings: Settings, flow: str, offsets: Mapping[str, int]) -> dict[str, int]:
    """Set the next offset of these tasks; return those of all tasks. Raises CommitFenced if a worker was first."""
    return {task: each.position for task, each in change_positions(settings, flow, offsets).items()}
