"""A Pulsar that asks for a token: it is taken from the environment, by the client and by the admin calls alike."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import secrets
from pathlib import Path

import pytest

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.brokers.pulsar import PulsarBroker
from millrace.log.registry import open_service
from tests.conformance.reading import read_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def token(key: bytes, role: str) -> str:
    """A JSON web token for `role`, signed with HS256."""

    def encoded(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    body = f"{encoded(json.dumps({'alg': 'HS256'}).encode())}.{encoded(json.dumps({'sub': role}).encode())}"
    return f"{body}.{encoded(hmac.new(key, body.encode(), hashlib.sha256).digest())}"


class Guarded(PulsarBroker):
    """A broker whose health is told to its administrator alone."""

    token = ""

    def ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port["admin"], timeout=5.0)
        try:
            header = {"Authorization": f"Bearer {self.token}"}
            connection.request("GET", "/admin/v2/brokers/health", headers=header)
            return connection.getresponse().read() == b"ok"
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def test_a_token_of_the_environment_opens_the_log_and_no_token_or_a_wrong_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = secrets.token_bytes(32)
    admin = token(key, "admin")
    properties = {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "authenticationProviders": "org.apache.pulsar.broker.authentication.AuthenticationProviderToken",
        "tokenSecretKey": f"data:;base64,{base64.b64encode(key).decode()}",
        "superUserRoles": "admin",
        "brokerClientAuthenticationPlugin": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
        "brokerClientAuthenticationParameters": f"token:{admin}",
    }
    guarded = Guarded(tmp_path / "pulsar", settings=Settings(), properties=properties)
    guarded.token = admin
    with guarded as broker:
        for wrong in ("", token(secrets.token_bytes(32), "admin")):
            monkeypatch.setenv("MILLRACE_LOG_TOKEN", wrong)
            with pytest.raises(InvalidSettings, match="credentials"):
                open_service(broker.url)
        monkeypatch.setenv("MILLRACE_LOG_TOKEN", admin)
        with open_service(broker.url) as service:
            service.create("p")
            log = service.open("p")
            ids = log.append([b"a", b"b"])
            log.truncate(ids[1])
            assert read_all(log, ids[1]) == [(ids[1], b"b")]
        assert admin not in (broker.data / "broker.json").read_text()
