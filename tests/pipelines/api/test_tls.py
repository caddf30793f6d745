"""The service's own port by TLS, and by nothing else where it has a certificate."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.service.server import serving
from tests.certificates import certificate
from tests.pipelines.api.test_routes import OWN, Service, service

__all__ = ["service"]


def test_the_service_is_known_by_its_certificate(service: Service, settings: Settings, tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "localhost")
    stranger, _ = certificate(tmp_path, "stranger")
    guarded = replace(settings, log_tls_cert=str(chain), log_tls_key=str(key))
    with serving(service.app, guarded) as address:
        assert address.startswith("https://")
        asked = urllib.request.Request(f"{address}/api/v1/pipelines-health", headers={"Authorization": f"Bearer {OWN}"})
        with urllib.request.urlopen(asked, context=ssl.create_default_context(cafile=str(chain)), timeout=20) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(asked, context=ssl.create_default_context(cafile=str(stranger)), timeout=20)
        plain = urllib.request.Request(address.replace("https", "http"))
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(plain, timeout=20)
