"""`millrace tokens`: a token is shown once, opens what it was made for, and nothing once it is revoked."""

from __future__ import annotations

import pytest

from millrace.base.errors import LogUnavailable, PermissionDenied
from millrace.client.database import Database, connect
from millrace.rpc.discovery import read_record
from tests.cli.deployment import Deployment


def connected(deployment: Deployment, token: str) -> Database:
    record = read_record(deployment.settings.log_path)
    assert record is not None
    return connect(record.address, token=token, settings=deployment.settings, deadline=1.0)


@pytest.mark.slow
def test_a_token_is_made_used_listed_and_revoked(deployment: Deployment) -> None:
    deployment.create_users()
    made = deployment.as_json("tokens", "add", "shop", "--role", "read", "--on", "users", "--expires", "30d")
    with connected(deployment, made["token"]) as client:
        assert client.definition("users").name == "users"
        with pytest.raises(PermissionDenied, match="'shop'"):
            client.catalog.drop_collection("users")
    [listed] = deployment.as_json("tokens", "list")
    assert (listed["name"], listed["may"], listed["state"]) == ("shop", ["read on collection:users"], "good")
    assert made["token"] not in deployment.ok("tokens", "list") + str(listed)
    assert "Revoked shop" in deployment.ok("tokens", "revoke", "shop")
    with pytest.raises(LogUnavailable, match="revoked"):
        connected(deployment, made["token"])
    assert "no tokens" in deployment.ok("tokens", "list")


def test_what_cannot_be_is_refused_and_changes_nothing(deployment: Deployment) -> None:
    deployment.ok("tokens", "add", "shop", "--role", "produce", "--role", "read")
    deployment.fails("INVALID_ARGUMENT", "tokens", "add", "shop", "--role", "read")
    deployment.fails("INVALID_ARGUMENT", "tokens", "add", "../shop", "--role", "read")
    deployment.fails("INVALID_ARGUMENT", "tokens", "add", "b", "--role", "read", "--on", "table:users")
    for when in ("soon", "2001-01-01", "0d", "9999999d", "1w"):
        deployment.fails("INVALID_ARGUMENT", "tokens", "add", "b", "--role", "read", "--expires", when)
    deployment.fails("INVALID_ARGUMENT", "tokens", "revoke", "b")
    assert deployment.run("tokens", "add", "b", "--role", "root").exit_code == 2
    assert deployment.run("tokens", "add", "b").exit_code == 2
    [listed] = deployment.as_json("tokens", "list")
    assert listed["may"] == ["produce on *", "read on *"]


def test_a_file_that_is_open_to_others_is_said(deployment: Deployment) -> None:
    deployment.ok("tokens", "add", "shop", "--role", "read")
    (deployment.settings.data_dir / "access" / "tokens.json").chmod(0o644)
    for arguments in (("list",), ("add", "b", "--role", "read"), ("revoke", "shop")):
        assert "chmod 600" in deployment.fails("TOKEN_FILE_REFUSED", "tokens", *arguments)
