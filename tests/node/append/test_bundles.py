"""Small appends to several PChannels share messages; each has the answer that it would have alone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from millrace.base.deadline import Deadline
from millrace.base.errors import AppendRejected, ChannelNotFound, InvalidArgument, LogUnavailable, Malformed
from millrace.client import append_bundles
from millrace.client.append_bundles import BundledAppends
from millrace.client.append_client import AppendClient
from millrace.message.wire.encode import encode_entry
from millrace.node.append.server import AppendExtension
from millrace.rpc.bundles import BundledAppend, decode_bundle, encode_bundle
from millrace.rpc.link import ExchangeStream
from millrace.rpc.outcome import OUTCOME_SCHEMA, AppendOutcome
from tests.node.append.samples import insert, keys_of, opening
from tests.waiting import until

PCHANNELS = [f"p{number}" for number in range(12)]
KEYS = keys_of("p0_1v0", 200)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("served")
    with AppendClient.connect(folder) as client:
        for name in PCHANNELS:
            client.service.create(name)
            client.append(name, opening(name)).results()
        yield folder
        client.service.shutdown()


@pytest.fixture
def client(data_dir: Path) -> Iterator[AppendClient]:
    with AppendClient.connect(data_dir) as connected:
        yield connected


class Held:
    """Keeps the first bundles back until all the others wait, and notes how many appends each has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.waiting: Callable[[], int] = lambda: 0
        plain_answers, plain_append = BundledAppends._answers, BundledAppends.append
        found: list[BundledAppends] = []

        def append(bundles: BundledAppends, *arguments: object) -> AppendOutcome:
            found.append(bundles)
            return plain_append(bundles, *arguments)  # type: ignore[arg-type]

        def answers(bundles: BundledAppends, appends: list[BundledAppend]) -> object:
            first, _ = not self.sizes, self.sizes.append(len(appends))
            if first:
                until(lambda: self.waiting() == len(bundles._group.waiting))
            return plain_answers(bundles, appends)

        monkeypatch.setattr(append_bundles, "SINGLES", 0)
        monkeypatch.setattr(BundledAppends, "append", append)
        monkeypatch.setattr(BundledAppends, "_answers", answers)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def appended(client: AppendClient, held: Held, entries: list[tuple[str, bytes]]) -> list[Future[AppendOutcome]]:
    """Append all entries at once: the first alone, the others together."""
    held.waiting = lambda: len(entries) - held.sizes[0]
    with ThreadPoolExecutor(len(entries)) as pool:
        return [pool.submit(client.append, name, entry, deadline=20.0) for name, entry in entries]


def one(key: int, pchannel: str, **given: int) -> bytes:
    return encode_entry([insert(key, vchannel=f"{pchannel}_1v0", pchannel=pchannel, **given)])


def test_each_append_has_its_own_answer(client: AppendClient, held: Held) -> None:
    entries = [(name, one(key, name)) for key, name in zip(KEYS, PCHANNELS, strict=False)]
    answers = appended(client, held, entries)
    assert all(each.result().result().time_tick > 0 for each in answers)
    assert len(held.sizes) == 2
    assert sum(held.sizes) == len(entries)
    by_name = {name: each.result().result() for (name, _), each in zip(entries, answers, strict=True)}
    again = appended(client, held, [(name, one(KEYS[50 + at], name)) for at, name in enumerate(PCHANNELS)])
    for name, each in zip(PCHANNELS, again, strict=True):
        assert each.result().result().message_id > by_name[name].message_id
        assert each.result().result().time_tick > by_name[name].time_tick


def test_one_that_fails_fails_alone(client: AppendClient, held: Held) -> None:
    wrong = encode_entry([insert(KEYS[0], vchannel="p1_1v1", pchannel="p1")])
    entries = [("p0", one(KEYS[0], "p0")), ("nowhere", one(KEYS[1], "p0")), ("p1", wrong), ("p2", b"no entry")]
    good, missing, misplaced, malformed = appended(client, held, entries)
    assert good.result().result()
    with pytest.raises(ChannelNotFound):
        missing.result()
    with pytest.raises(AppendRejected):
        misplaced.result().result()
    with pytest.raises(Malformed):
        malformed.result()


def test_the_appends_of_a_bundle_to_one_pchannel_have_an_answer_each(client: AppendClient, held: Held) -> None:
    """One that is refused leaves the others their answers."""
    entries = [("p0", one(key, "p0")) for key in KEYS[60:80]] + [("p1", one(KEYS[80], "p1")), ("p0", b"no entry")]
    answers = appended(client, held, entries)
    assert len({each.result().result().message_id for each in answers[:20]}) == 20
    assert answers[20].result().result()
    with pytest.raises(Malformed):
        answers[21].result()


def test_the_server_appends_a_whole_bundle_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One append of the log for each PChannel; each append of the bundle has its own answer."""
    rows = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in OUTCOME_SCHEMA], schema=OUTCOME_SCHEMA)
    steps: list[str] = []

    class Pending:
        def __init__(self, name: str) -> None:
            self.name = name

        def outcome(self, *, timeout: float) -> AppendOutcome:
            steps.append(f"wait {self.name}")
            return AppendOutcome(rows)

    def submit(self: object, pchannel: str, appends: list[pa.LargeBinaryArray], door: object) -> list[Pending]:
        steps.append(f"append {len(appends)} to {pchannel}")
        return [Pending(pchannel) for _ in appends]

    monkeypatch.setattr(AppendExtension, "submit", submit)
    values = pa.array([b"e"], pa.large_binary())
    bundle = [BundledAppend(name, values, Deadline.after(5.0)) for name in ("p0", "p1", "p0", "p0")]
    answers = AppendExtension._bundled(object.__new__(AppendExtension), bundle, None)  # type: ignore[arg-type]
    assert steps == ["append 3 to p0", "append 1 to p1", "wait p0", "wait p1", "wait p0", "wait p0"]
    assert len(answers) == 4


def test_an_append_alone_and_a_large_one_are_not_bundled(client: AppendClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BundledAppends, "_answers", None)
    assert client.append("p0", one(KEYS[3], "p0")).result()
    monkeypatch.setattr(append_bundles, "SINGLES", 0)
    monkeypatch.setattr(append_bundles, "SMALL_BYTES", 10)
    assert client.append("p0", one(KEYS[4], "p0")).result()


def test_a_lost_answer_is_ambiguous_for_each(data_dir: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    with AppendClient.connect(data_dir) as client:
        server = psutil.Process(client.service.ping()["pid"])
        answers_of = BundledAppends._answers

        def stopped(bundles: BundledAppends, appends: list[BundledAppend]) -> object:
            if len(appends) > 1:
                server.send_signal(signal.SIGSTOP)
                threading.Timer(0.5, server.kill).start()
            return answers_of(bundles, appends)

        monkeypatch.setattr(BundledAppends, "_answers", stopped)
        entries = [(name, one(key, name, producer=5, sequence=0)) for key, name in zip(KEYS, PCHANNELS, strict=False)]
        lost = [each.exception() for each in appended(client, held, entries)]
        assert sum(isinstance(each, LogUnavailable) and "unknown" in str(each) for each in lost) == len(entries) - 1
        monkeypatch.setattr(BundledAppends, "_answers", answers_of)
        held.sizes[:] = [0]
        again = appended(client, held, entries)
        assert all(each.result().result().time_tick > 0 for each in again), "each takes effect once"


def test_a_server_of_an_earlier_build_gets_each_alone(
    client: AppendClient, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a server takes the command for one without its PChannel."""
    monkeypatch.setattr(append_bundles, "ExchangeStream", lambda link, _: ExchangeStream(link, {"extension": "append"}))
    entries = [(name, one(key, name)) for key, name in zip(KEYS[100:], PCHANNELS, strict=False)]
    assert all(each.result().result().time_tick > 0 for each in appended(client, held, entries))
    (bundles,) = client.router._bundles.values()
    assert bundles._refused
    asked = len(held.sizes)
    assert client.append("p0", one(KEYS[150], "p0")).result()
    assert len(held.sizes) == asked, "it is not asked again"


def test_a_thread_that_is_interrupted_leaves_the_others_their_answers(client: AppendClient, held: Held) -> None:
    """The one that leads is interrupted before it sends: the next one leads."""
    plain = BundledAppends._answers
    interrupted = threading.Event()

    def interrupt(bundles: BundledAppends, appends: list[BundledAppend]) -> object:
        if not interrupted.is_set():
            until(lambda: len(bundles._group.waiting) == 2)
            interrupted.set()
            raise KeyboardInterrupt
        return plain(bundles, appends)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(BundledAppends, "_answers", interrupt)
        found = [pool.submit(client.append, name, one(KEYS[160], name), deadline=20.0) for name in PCHANNELS[:3]]
        errors = [each.exception() for each in found]
    assert [type(each) for each in errors if each is not None] == [KeyboardInterrupt]


def test_metadata_that_do_not_fit_are_refused() -> None:
    values = pa.array([b"a", b"b", b"c"], pa.large_binary())
    appends = [BundledAppend("p0", values.slice(0, 1), Deadline.after(1.0))]
    appends.append(BundledAppend("p1", values.slice(1, 2), Deadline.after(1.0)))
    together, metadata = encode_bundle(appends)
    decoded = decode_bundle(together, metadata)
    assert [(each.pchannel, each.values.to_pylist()) for each in decoded] == [("p0", [b"a"]), ("p1", [b"b", b"c"])]
    for wrong in (
        b"",
        b"[]",
        b'{"appends": []}',
        b'{"appends": [["p0", 3]]}',
        b'{"appends": [["p0", 2, 1.0]]}',
        b'{"appends": [["p0", 4, 1.0]]}',
        b'{"appends": [["p0", -1, 1.0], ["p1", 4, 1.0]]}',
        b'{"appends": [["p0", 3, NaN]]}',
        b'{"appends": [[0, 3, 1.0]]}',
        b'{"appends": [["p0", 0, 1.0], ["p1", 3, 1.0]]}',
    ):
        with pytest.raises(InvalidArgument):
            decode_bundle(values, wrong)
