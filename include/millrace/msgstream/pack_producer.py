"""The producing half of a stream: a pack becomes one atomic batch per channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, InvalidArgument, MillraceError
from millrace.log.protocol import Log, LogService
from millrace.message.ids import LogId
from millrace.msgstream.pack import MsgPack
from millrace.msgstream.protocol import RepackFunc, TsMsg
from millrace.msgstream.repack import channel_numbers, default_repack


class PackProducer:
    """Channels to produce to, in order. As thread-safe as the logs are."""

    def __init__(self, service: LogService, *, marshal: Callable[[TsMsg], bytes] | None = None) -> None:
        self._service = service
        self._marshal = marshal or (lambda msg: msg.marshal())
        self._channels: list[tuple[str, Log]] = []
        self.repack: RepackFunc = default_repack

    def open(self, channels: Sequence[str]) -> None:
        """Produce to these channels from now on.

        Raises ChannelNotFound, InvalidArgument.
        """
        if len(set(channels)) != len(channels):
            raise InvalidArgument("a channel occurs twice among those to produce to")
        opened = [(name, self._service.open(name)) for name in channels]
        self.close()
        self._channels = opened

    def produce(
        self, pack: MsgPack, *, timeout: float, trace_ctx: Mapping[str, str] | None
    ) -> dict[str, Sequence[LogId]]:
        """See MsgStream.produce."""
        channels = self._checked(pack, trace_ctx)
        if len(channels) == 1 and self.repack is default_repack:
            return self._append({0: pack.msgs}, timeout)
        divided = self.repack(pack.msgs, channel_numbers(pack.msgs, len(channels)))
        wrong = [number for number in divided if not 0 <= number < len(channels)]
        if wrong:
            raise InvalidArgument(f"the repack function returned channel {wrong[0]}, but there are {len(channels)}")
        return self._append({number: divided[number].msgs for number in sorted(divided)}, timeout)

    def broadcast(
        self, pack: MsgPack, *, timeout: float, trace_ctx: Mapping[str, str] | None
    ) -> dict[str, Sequence[LogId]]:
        """See MsgStream.broadcast."""
        channels = self._checked(pack, trace_ctx)
        return self._append(dict.fromkeys(range(len(channels)), pack.msgs), timeout)

    def close(self) -> None:
        """Close the logs."""
        channels, self._channels = self._channels, []
        for _, log in channels:
            log.close()

    def _checked(self, pack: MsgPack, trace_ctx: Mapping[str, str] | None) -> list[tuple[str, Log]]:
        if not self._channels:
            raise InvalidArgument("this stream produces to no channel: call as_producer first")
        if given := pack.trace_ctx or trace_ctx:
            for msg in pack.msgs:
                if not msg.trace_ctx:
                    msg.trace_ctx = dict(given)
        return self._channels

    def _append(self, divided: Mapping[int, Sequence[TsMsg]], timeout: float) -> dict[str, Sequence[LogId]]:
        deadline = Deadline.after(timeout)
        # Marshal all messages before the first append, so that an invalid message refuses the whole pack.
        marshalled: dict[int, bytes] = {}
        values: dict[int, list[bytes]] = {}
        for number, msgs in divided.items():
            values[number] = []
            for msg in msgs:
                if id(msg) not in marshalled:
                    marshalled[id(msg)] = self._marshal(msg)
                values[number].append(marshalled[id(msg)])
        done: dict[str, Sequence[LogId]] = {}
        try:
            for number, batch in values.items():
                name, log = self._channels[number]
                if deadline.expired():
                    raise DeadlineExceeded(f"nothing was appended to channel {name} within {timeout:.1f} s")
                if batch:
                    done[name] = log.append(batch)
        except MillraceError as error:
            error.add_note(f"appended before that, durably: to {', '.join(done) or 'no channel'}")
            raise
        return done
