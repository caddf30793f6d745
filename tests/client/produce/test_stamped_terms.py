"""What was stamped, kept and is sent by a successor, when a newer term has opened meanwhile."""

from __future__ import annotations

from pathlib import Path

from millrace.base.errors import AppendRejected
from millrace.client.produce.sequencer import OutboundEntry
from tests.client.produce.test_lane import Rig


def test_what_was_stamped_before_a_newer_term_opened_is_sent_in_that_term_by_a_lane_that_knows_it_already(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    after = rig.host.tick("dml_0")
    key = rig.keys(0, 1)[0]
    with rig.producer() as producer:
        stamped = producer.lane("dml_0").stamp([rig.message(key)])
        rig.coordinator.open_term("dml_0")
        with rig.producer(resumed=producer.id) as successor:
            waiting = [OutboundEntry(stamped, ambiguous=True)]
            sent = list(waiting)
            successor.lane("dml_0").deliver(lambda: waiting.pop() if waiting else None, stamped=True)
            assert not isinstance(sent[0].answers[0], AppendRejected)
            assert rig.accepted(producer, after)[rig.collection.vchannels[0]] == [key]
    rig.close()
