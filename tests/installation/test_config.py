"""Secrets are generated once and belong to their owner alone.

The address comes from airflow.cfg, and a taken port is named.
"""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.installation.config import (
    BindAddress,
    airflow_environment,
    airflow_root,
    choose_bind_address,
    free_port,
)
from millrace.installation.secrets import PASSWORDS_FILE, SECRETS_FILE, load_secrets
from millrace.installation.system import Installation


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_secrets_are_generated_once_and_for_their_owner_alone(tmp_path: Path) -> None:
    first = load_secrets(tmp_path / "state")
    assert mode(tmp_path / "state") == 0o700
    assert [mode(tmp_path / "state" / name) for name in (SECRETS_FILE, PASSWORDS_FILE)] == [0o600, 0o600]
    assert load_secrets(tmp_path / "state") == first
    other = load_secrets(tmp_path / "other")
    assert not {first.fernet_key, first.jwt_secret, first.api_secret_key, first.password} & {
        other.fernet_key,
        other.jwt_secret,
        other.api_secret_key,
        other.password,
    }
    assert first.password not in repr(first)


def test_secrets_that_others_can_read_are_closed_again(tmp_path: Path) -> None:
    first = load_secrets(tmp_path)
    (tmp_path / SECRETS_FILE).chmod(0o644)
    assert load_secrets(tmp_path) == first
    assert mode(tmp_path / SECRETS_FILE) == 0o600


def test_a_password_that_somebody_chose_stands(tmp_path: Path) -> None:
    load_secrets(tmp_path)
    (tmp_path / PASSWORDS_FILE).write_text(json.dumps({"admin": "chosen", "guest": "other"}))
    assert load_secrets(tmp_path).password == "chosen"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"fernet_key": "x"}'])
def test_damaged_secrets_are_refused_with_the_file_and_the_cure(tmp_path: Path, text: str) -> None:
    load_secrets(tmp_path)
    (tmp_path / SECRETS_FILE).write_text(text)
    with pytest.raises(InvalidSettings, match=r"secrets\.json is damaged: restore it"):
        load_secrets(tmp_path)


def test_state_does_not_go_into_the_checkout() -> None:
    with pytest.raises(InvalidSettings, match="secrets do not belong there"):
        Installation(Settings(data_dir=airflow_root() / "data"))


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_named_with_what_to_do(taken: int) -> None:
    for asked, env in ((taken, {}), (None, {"AIRFLOW__API__PORT": str(taken)})):
        with pytest.raises(InvalidSettings, match=f"port {taken} on 127.0.0.1 is taken.*--port 0.*airflow.cfg"):
            choose_bind_address(airflow_root(), port=asked, env=env)


def test_port_0_takes_a_free_one() -> None:
    bind = choose_bind_address(airflow_root(), port=0, env={})
    assert bind.port > 0
    assert bind.address == f"http://127.0.0.1:{bind.port}"


def test_ports_that_are_taken_for_airflow_differ_and_are_none_that_others_are_given_by_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.sample", lambda ports, count: list(ports)[:count])  # the same ones each time
    bind = choose_bind_address(airflow_root(), port=0, env={})
    settings, state = Settings(data_dir=tmp_path / "data"), tmp_path / "data" / "airflow"
    found = airflow_environment(settings, load_secrets(state), root=airflow_root(), state=state, bind=bind, env={})
    names = ("API__PORT", "LOGGING__WORKER_LOG_SERVER_PORT", "LOGGING__TRIGGER_LOG_SERVER_PORT")
    ports = {int(found[f"AIRFLOW__{name}"]) for name in names}
    assert len(ports) == 3
    assert all(20_000 <= port < 32_768 for port in ports)


def test_a_taken_port_among_the_quiet_ones_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = choose_bind_address(airflow_root(), port=0, env={}).port
    second = free_port("127.0.0.1", 0, exclude=[first])
    monkeypatch.setattr("random.sample", lambda ports, count: [first, second])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first))
        listener.listen()
        assert choose_bind_address(airflow_root(), port=0, env={}).port == second


@pytest.mark.parametrize("named", ["eighty", "65536", "-1"])
def test_what_is_no_port_is_refused(named: str) -> None:
    with pytest.raises(InvalidSettings, match="0 to 65535"):
        choose_bind_address(airflow_root(), port=None, env={"AIRFLOW__API__PORT": named})


def test_airflow_gets_the_secrets_the_address_and_the_mark_and_keeps_what_its_user_set(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    state = tmp_path / "data" / "airflow"
    secrets = load_secrets(state)
    env = {"AIRFLOW__CORE__PARALLELISM": "7", "AIRFLOW__API_AUTH__JWT_SECRET": "weak", "PATH": "/bin"}
    found = airflow_environment(
        settings, secrets, root=airflow_root(), state=state, bind=BindAddress("127.0.0.1", 4711), env=env
    )
    assert found["AIRFLOW__API_AUTH__JWT_SECRET"] == secrets.jwt_secret
    assert found["AIRFLOW__CORE__PARALLELISM"] == "7"
    assert found["AIRFLOW__API__BASE_URL"] == "http://127.0.0.1:4711"
    assert Settings.load(env=found) == settings
    assert secrets.password not in found.values()


def test_no_secret_and_no_state_stands_in_the_checkouts_configuration() -> None:
    text = (airflow_root() / "airflow.cfg").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert not [line for line in lines if "secret" in line or "fernet" in line or "password" in line]
