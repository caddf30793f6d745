"""Flow control as a machine: readings in, modes, waits and refusals out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidSettings, RateLimited
from millrace.node.append.flow_control import (
    MAX_WAIT_SECONDS,
    STEP_SECONDS,
    FlowControl,
    FlowLimits,
    FlowWatermark,
    Level,
    Mode,
)

MEMORY = FlowWatermark("memory", slow=0.8, reject=0.9)
DISK = FlowWatermark("disk", slow=1000.0, reject=100.0, falling=True)
LIMITS = FlowLimits((MEMORY, DISK), start_rate=1000.0, least_rate=100.0)


def control() -> FlowControl:
    return FlowControl(LIMITS)


def test_a_calm_host_lets_everything_pass_at_once() -> None:
    flow = control()
    assert flow.observe({"memory": 0.5, "disk": 5000.0}, now=0.0) is Mode.NORMAL
    assert flow.admit(1 << 40, now=0.0) == 0.0


@pytest.mark.parametrize(
    ("readings", "mode"),
    [
        ({"memory": 0.8}, Mode.SLOWDOWN),
        ({"memory": 0.9}, Mode.REJECT),
        ({"disk": 999.0}, Mode.SLOWDOWN),
        ({"disk": 99.0}, Mode.REJECT),
        ({"memory": 0.85, "disk": 99.0}, Mode.REJECT),
        ({"memory": 0.1, "disk": 1001.0}, Mode.NORMAL),
    ],
)
def test_the_worst_watermark_decides_the_mode(readings: dict[str, float], mode: Mode) -> None:
    assert control().observe(readings, now=0.0) is mode


def test_a_slowdown_admits_bytes_at_its_rate() -> None:
    flow = control()
    flow.observe({"memory": 0.85}, now=0.0)
    assert flow.admit(1000, now=0.0) == 0.0
    assert flow.admit(500, now=0.0) == 1.0
    assert flow.admit(0, now=1.5) == 0.0


def test_a_slowdown_tightens_step_by_step_down_to_the_least_rate() -> None:
    flow = control()
    rates = []
    for step in range(30):
        flow.observe({"memory": 0.85}, now=step * STEP_SECONDS)
        rates.append(flow.rate)
    assert rates[0] == LIMITS.start_rate
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == LIMITS.least_rate


def test_an_append_that_would_wait_too_long_is_refused_and_leaves_no_debt() -> None:
    flow = control()
    flow.observe({"memory": 0.85}, now=0.0)
    flow.admit(int(LIMITS.start_rate * (MAX_WAIT_SECONDS + 2)), now=0.0)
    with pytest.raises(RateLimited) as refused:
        flow.admit(1 << 30, now=0.0)
    assert refused.value.retriable
    assert refused.value.retry_after == pytest.approx(2.0)
    assert flow.admit(1, now=2.0) == pytest.approx(MAX_WAIT_SECONDS)


def test_a_refusal_names_the_watermark_and_its_figures() -> None:
    flow = control()
    flow.observe({"disk": 42.0}, now=0.0)
    with pytest.raises(RateLimited, match=r"disk is 42 \(slow from 1000, refused from 100\)"):
        flow.admit(1, now=0.0)
    assert flow.describe()["refused"] == 1


def test_a_host_that_recovers_grows_back_to_normal_and_only_then_lets_everything_pass() -> None:
    flow = control()
    flow.observe({"disk": 42.0}, now=0.0)
    assert flow.observe({"disk": 5000.0}, now=1.0) is Mode.RECOVERY
    modes, now = [], 1.0
    while flow.mode is not Mode.NORMAL and len(modes) < 100:
        now += STEP_SECONDS
        modes.append(flow.observe({"disk": 5000.0}, now=now))
    assert modes[-1] is Mode.NORMAL
    assert len(modes) > 3
    assert flow.admit(1 << 40, now=now) == 0.0


def test_a_reading_that_wavers_about_its_mark_does_not_flip_the_mode() -> None:
    flow = control()
    modes = {flow.observe({"memory": 0.8 - 0.01 * (step % 2)}, now=float(step)) for step in range(10)}
    assert modes == {Mode.SLOWDOWN}
    flow = control()
    assert {flow.observe({"disk": 99.0 + 4 * (step % 2)}, now=float(step)) for step in range(10)} == {Mode.REJECT}


@pytest.mark.parametrize(
    "build", [lambda: FlowWatermark("m", 0.9, 0.8), lambda: FlowWatermark("d", 1.0, 2.0, falling=True)]
)
def test_a_watermark_that_refuses_before_it_slows_is_no_setting(build: object) -> None:
    with pytest.raises(InvalidSettings):
        build()  # type: ignore[operator]


@given(
    st.lists(
        st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 1.0), st.floats(0.0, 3000.0), st.integers(0, 2000)),
        min_size=1,
        max_size=60,
    )
)
def test_whatever_happens_no_wait_is_too_long_and_no_more_is_admitted_than_the_rates_allow(
    steps: list[tuple[float, float, float, int]],
) -> None:
    flow, now, allowed, admitted, was = control(), 0.0, 0.0, 0, Mode.NORMAL
    for passed, memory, disk, size in steps:
        allowed += flow.rate * passed if was is not Mode.NORMAL else 0.0
        now += passed
        mode = flow.observe({"memory": memory, "disk": disk}, now=now)
        if mode is Mode.NORMAL:
            allowed, admitted = 0.0, 0
        refusal, wait = None, 0.0
        try:
            wait = flow.admit(size, now=now)
            admitted += 0 if mode is Mode.NORMAL else size
        except RateLimited as error:
            refusal = error
        assert 0.0 <= wait <= MAX_WAIT_SECONDS
        assert refusal is None or refusal.retry_after > 0
        assert {Mode.NORMAL: refusal is None, Mode.REJECT: refusal is not None}.get(mode, True)
        levels = flow.describe()["levels"].values()
        assert (mode is Mode.REJECT) == (max(levels) == Level.REJECT)
        # What is out was paid for, but for what may wait and the one append that went beyond it.
        assert admitted <= allowed + LIMITS.start_rate * 2 * (MAX_WAIT_SECONDS + STEP_SECONDS) + 2000
        was = mode
