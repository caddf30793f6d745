"""How processes reach a bucket: by environment, profile or web identity; and no secret is where others look."""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import psutil
import pyarrow as pa
import pytest

import millrace.testing
from millrace.base.errors import InvalidSettings
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.objects import s3a_options
from millrace.storage.store import list_below, store_at
from millrace.storage.table import create_table, table_at
from tests.s3_server import Faults, bucket

SCHEMA = pa.schema([pa.field("id", pa.int64())])
SECRET = "a-secret-of-40-characters-0123456789abcd"
TOKEN = "a-session-token-of-some-length"


@pytest.fixture
def faults() -> Iterator[Faults]:
    with Faults() as proxy:
        yield proxy


@pytest.fixture
def uri(faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket for a process without credentials."""
    with bucket(monkeypatch, faults.at) as found:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield f"{found}/t"


def use(uri: str) -> None:
    """Every way in which a process reaches the store: obstore's, delta-rs', and pyarrow's file system."""
    create_table(uri, SCHEMA, partition_by=[])
    sink = FileSink.at(uri, SCHEMA, ())
    sink.write(pa.table({"id": [1]}, schema=SCHEMA), {})
    part = CommitPart(adds=tuple(sink.finish()), app_transactions={"a": AppTransaction(None, 1)})
    assert not commit_fenced(table_at(uri), [part]).fenced
    assert store_at(uri).delta().to_pyarrow_table()["id"].to_pylist() == [1]
    assert table_at(uri).dataset().to_table()["id"].to_pylist() == [1]
    table_at(uri).vacuum(0, full=False)


def test_keys_of_the_environment(uri: str, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    use(uri)
    assert set(faults.signers) == {"of-the-environment"}


def test_a_profile(uri: str, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text(
        "[default]\naws_access_key_id = of-the-default\naws_secret_access_key = x\n"
        f"[warehouse]\naws_access_key_id = of-the-profile\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_PROFILE", "warehouse")
    use(uri)
    assert set(faults.signers) == {"of-the-profile"}


class Tokens(ThreadingHTTPServer):
    """A security token service: an identity's token for keys of its role."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked: list[dict[str, Any]] = []


class _Answer(BaseHTTPRequestHandler):
    server: Tokens

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        asked = {name: value[0] for name, value in parse_qs(f"{self.path.partition('?')[2]}&{body}").items()}
        self.server.asked.append(asked)
        keys = f"""<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>of-the-role</AccessKeyId>
<SecretAccessKey>{SECRET}</SecretAccessKey><SessionToken>{TOKEN}</SessionToken>
<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>
<AssumedRoleUser><Arn>arn:aws:sts::1:assumed-role/warehouse/m</Arn><AssumedRoleId>A:m</AssumedRoleId></AssumedRoleUser>
</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>""".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(keys)))
        self.end_headers()
        self.wfile.write(keys)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def tokens() -> Iterator[Tokens]:
    server = Tokens()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_web_identity(
    uri: str, faults: Faults, tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = tmp_path / "identity"
    identity.write_text("the-identity's-token")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(identity))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/warehouse")
    monkeypatch.setenv("AWS_ROLE_SESSION_NAME", "millrace")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{tokens.server_address[1]}")
    use(uri)
    assert set(faults.signers) == {"of-the-role"}
    assert {each["Action"] for each in tokens.asked} == {"AssumeRoleWithWebIdentity"}
    assert {each["WebIdentityToken"] for each in tokens.asked} == {"the-identity's-token"}
    assert {each["RoleArn"] for each in tokens.asked} == {"arn:aws:iam::1:role/warehouse"}
    assert len(tokens.asked) <= 12, "a store asks once for all its requests"


def test_without_credentials_it_is_said_what_to_do(uri: str) -> None:
    # The address of a machine's role refuses, or does not answer, by the network here.
    with pytest.raises((OSError, InvalidSettings), match="the environment has no credentials"):
        store_at(uri).list("")


CALLS: tuple[Callable[[Any], Any], ...] = (
    lambda store: store.list(""),
    lambda store: store.list_log(""),
    lambda store: store.read("n"),
    lambda store: store.replace("n", b"1"),
    lambda store: store.put_new("n", b"1"),
    lambda store: store.exists(),
)


@pytest.mark.parametrize("call", CALLS)
def test_a_bucket_that_is_not_there_is_a_wrong_setting(
    uri: str, monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], Any]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(InvalidSettings, match=r"NoSuchBucket.*create the bucket") as found:
        call(store_at(f"s3://not-there-{uuid.uuid4().hex}/t"))
    assert "<?xml" not in str(found.value)
    assert store_at(uri).read("no-such-file") is None


@pytest.mark.parametrize("call", CALLS)
def test_keys_without_rights_are_a_wrong_setting(
    uri: str, faults: Faults, monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], Any]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    faults.break_request = lambda method, path: "403"
    with pytest.raises(InvalidSettings, match="AccessDenied: it said no: check the credentials"):
        call(store_at(uri))


@pytest.mark.parametrize("call", CALLS)
def test_another_region_is_a_wrong_setting(
    uri: str, faults: Faults, monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], Any]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    faults.break_request = lambda method, path: "301"
    with pytest.raises(InvalidSettings, match="set AWS_REGION to the bucket's region"):
        call(store_at(uri))


def test_an_address_without_tls_is_refused_until_it_is_allowed(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(InvalidSettings, match="AWS_ALLOW_HTTP=true"):
        store_at(f"{uri}/without-tls").list("")


def test_a_profile_that_is_not_there_is_a_wrong_setting(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(InvalidSettings, match="AWS_PROFILE"):
        store_at(uri).list("")
    with pytest.raises(InvalidSettings, match="AWS_PROFILE"):
        _ = store_at(uri).options


@pytest.mark.parametrize(
    "variables, wanted",
    [
        ({"AWS_SERVER_SIDE_ENCRYPTION": "AES256"}, "AES256"),
        ({"AWS_SERVER_SIDE_ENCRYPTION": "aws:kms", "AWS_SSE_KMS_KEY_ID": "key-1"}, "aws:kms key-1"),
    ],
)
def test_every_object_is_encrypted_as_the_environment_says(
    uri: str, faults: Faults, variables: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    use(uri)
    store_at(uri).replace("note", b"1")
    large = store_at(uri).put("large")
    large.write(b"x" * (17 << 20))  # in parts: the upload says it for all of them
    large.sync()
    large.close()
    assert set(faults.encryptions) <= {wanted, ""}
    parts = faults.encryptions.pop("", 0)
    assert parts <= 3, "of parts alone"
    assert faults.encryptions[wanted] >= 5


def test_no_secret_is_in_a_file_an_object_a_log_or_a_process_list(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    secrets = (SECRET, TOKEN)
    caplog.set_level(logging.DEBUG, "millrace")
    with millrace.testing.deployment(tmp_path / "data", tables=uri) as db:
        users = db.create_collection("users", {"id": "int64"}, key="id")
        users.insert([{"id": number} for number in range(10)])
        db.settle(deadline=60)
        assert users.read()["id"].to_pylist() == list(range(10))
        children = psutil.Process().children(recursive=True)
        commands = [" ".join(each.as_dict(["cmdline"])["cmdline"] or ()) for each in children]  # none of a zombie
        settings = json.dumps(db.settings.environment())
    store = store_at(uri)
    objects = {name: store.read(name) or b"" for name in list_below(store)}
    assert len(objects) > 10
    files = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) > 10
    for secret in secrets:
        assert secret not in caplog.text
        assert secret not in settings
        assert not [each for each in commands if secret in each]
        assert not [name for name, data in (objects | files).items() if secret.encode() in data]
        assert not [name for name, value in s3a_options().items() if secret in value]


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, (None, None)),
        ({"AWS_SERVER_SIDE_ENCRYPTION": "AES256"}, ("AES256", None)),
        ({"AWS_SERVER_SIDE_ENCRYPTION": "aws:kms", "AWS_SSE_KMS_KEY_ID": "key-1"}, ("SSE-KMS", "key-1")),
        ({"AWS_SERVER_SIDE_ENCRYPTION": "aws:kms:dsse", "AWS_SSE_KMS_KEY_ID": "key-1"}, ("DSSE-KMS", "key-1")),
    ],
)
def test_spark_encrypts_what_it_writes_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: tuple[str | None, str | None]
) -> None:
    for name in ("AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = s3a_options()
    assert (found.get("fs.s3a.encryption.algorithm"), found.get("fs.s3a.encryption.key")) == wanted
