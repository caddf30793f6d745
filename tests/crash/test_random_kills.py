"""SIGKILL of producer, log server, broker and Spark driver under load, at seeded random moments.

Nothing is lost or doubled.

The processes and the oracle outside of the system are kill_rig's.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.pulsar import PulsarBroker
from millrace.client.database import connect
from tests.crash.kill_rig import PRODUCERS, SCHEMA, Deployment, check, deployed, wait_flushed, wait_for_progress


def run_kills(deployment: Deployment, *, seed: int, victims: list[str]) -> None:
    chance = random.Random(seed)
    settings = deployment.settings
    with connect(settings=settings) as client:
        client.catalog.ensure_pchannels(2)
        for name in deployment.collections:
            client.catalog.create_collection(name, SCHEMA, vchannels=2)
    deployment.start_job()
    for _ in range(PRODUCERS):
        deployment.start_producer()
    for victim in victims:
        wait_for_progress(deployment, deployment.acknowledged())
        time.sleep(chance.uniform(0, 0.5))  # the random moment is what this test is about
        deployment.kill(victim, chance)
    wait_for_progress(deployment, deployment.acknowledged())
    for producer in deployment.producers:
        producer.kill()
    with connect(settings=settings) as client:
        ticks: dict[str, int] = {}
        for name in deployment.collections:
            ticks |= client.catalog.flush(name)
        wait_flushed(deployment, ticks)
        assert deployment.job is not None
        assert deployment.job.stop(deadline=60) == 0
        check(settings, client, deployment.noted(), seed, collections=deployment.collections)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(400)
def test_each_process_is_killed_once_under_load_and_every_row_is_there_once(tmp_path: Path) -> None:
    with deployed(tmp_path) as deployment:
        run_kills(deployment, seed=1, victims=["log server", "producer", "job"])


@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 4))
def test_with_200_collections_each_process_is_killed_and_every_row_is_there_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    victims = chance.sample(["log server", "producer", "job", "log server", "job"], k=5)
    with deployed(tmp_path, collections=[f"kills_{number}" for number in range(200)]) as deployment:
        run_kills(deployment, seed=seed, victims=victims)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [KafkaBroker, PulsarBroker])
def test_on_a_broker_each_process_is_killed_too_and_every_row_is_there_once(
    tmp_path: Path, kind: type[KafkaBroker] | type[PulsarBroker]
) -> None:
    broker = kind(tmp_path / "broker", settings=Settings.load())
    with deployed(tmp_path, broker=broker) as deployment:
        run_kills(deployment, seed=1, victims=["broker", "log server", "producer", "job", "broker"])


@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 6))
def test_random_kills_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    victims = chance.choices(["log server", "producer", "job"], weights=[4, 4, 2], k=10)
    with deployed(tmp_path) as deployment:
        run_kills(deployment, seed=seed, victims=victims)


@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 4))
def test_random_kills_on_kafka_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    victims = chance.choices(["broker", "log server", "producer", "job"], weights=[3, 3, 3, 1], k=10)
    with deployed(tmp_path, broker=KafkaBroker(tmp_path / "broker", settings=Settings.load())) as deployment:
        run_kills(deployment, seed=seed, victims=victims)
