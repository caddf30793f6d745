"""A consumer process for the kill test: consumes as a group through the folder's server, and says what it has.

python -m tests.msgstream.consumer FOLDER GROUP CHANNEL... : a line "got <end_ts> <id> <id> ..." a pack, then "done
<end_ts>" once it is acknowledged.
"""

from __future__ import annotations

import sys

from millrace.msgstream.factory import RmqMsgStreamFactory


def main(folder: str, group: str, channels: list[str]) -> None:
    with RmqMsgStreamFactory.served(folder) as factory:
        factory.set_params({"auto_ack": False, "timeout": 30.0, "group_lease": 0.5})
        stream = factory.new_tt_msg_stream()
        stream.as_consumer(channels, group)
        with stream:
            for pack in stream:
                print("got", pack.end_ts, *(msg.id for msg in pack.msgs), flush=True)
                stream.ack(pack)
                print("done", pack.end_ts, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
