"""Tables on an object store: S3 (``s3://bucket/prefix``), Google Cloud Storage (``gs://``), Azure (``az://``).

obstore and delta-rs reach it with the same options, which both take from the environment (docs/object-stores.md): a
credential is in no setting, table, log or process list.

An object is complete or absent, and durable once it is there, so nothing is synced, renamed or linked. There are no
locks either: an entry of a table's log stays for LOG_SECONDS instead, and a commit that took longer counts as one whose
outcome is unknown (millrace.storage.delta_log).
"""

from __future__ import annotations

import os
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from millrace.base.errors import InvalidSettings, StoreCannotPublish
from millrace.base.extras import import_optional
from millrace.base.settings.value import without_credentials
from millrace.storage.delta_log import is_log_file
from millrace.storage.log_mirror import ListedObject, announce
from millrace.storage.object_files import os_errors, read_whole
from millrace.storage.store import OBJECT_STORES, StoreUnreachable, TableStore, s3_server

if TYPE_CHECKING:
    import pyarrow.fs as fs
    from deltalake import DeltaTable

LOG_SECONDS: Final = 3600.0
"""Minimum time for which an entry of a table's log stays: far longer than a commit takes."""
MEMORY_BYTES: Final = 16 << 20
"""Bytes of a new file in memory. The rest waits for its upload in a temporary file on this machine."""
PART_BYTES: Final = 8 << 20
"""Bytes of a request of a larger upload, which is aborted if it fails."""

_TIMEOUT: Final = "30s"
"""Timeout of a request. With its repetitions, a call ends within `_RETRY_SECONDS`."""
_RETRY_SECONDS: Final = 60
_RETRIES: Final = 10
_CLIENT: Final = {"timeout": _TIMEOUT, "connect_timeout": "5s"}
_S3A_ENCRYPTION: Final = {"aes256": "AES256", "aws:kms": "SSE-KMS", "aws:kms:dsse": "DSSE-KMS"}
"""Names of S3A for the values of AWS_SERVER_SIDE_ENCRYPTION."""
_LOG_FOLDER: Final = "_delta_log"
_PROBE: Final = "_millrace_probe"
_PROBES: Final = 10
_UNKNOWN_HEADER: Final = "status code: 501"
"""Of a store's answer to a put with a condition that it does not know."""

_T = TypeVar("_T")


class ObjectStore:
    """The table below `uri`. It need not exist yet."""

    log_seconds = LOG_SECONDS

    def __init__(self, uri: str) -> None:
        self.uri = without_credentials(uri, "the address of an object store", setting="tables").rstrip("/")
        scheme, _, rest = self.uri.partition("://")
        if scheme not in OBJECT_STORES or not rest.partition("/")[0]:
            raise InvalidSettings(f"{uri} names no bucket: an address is <scheme>://<bucket>/<prefix>")

    @property
    def options(self) -> Mapping[str, str]:
        """Options of the store (TableStore.options). Raises InvalidSettings if a profile or a web identity gives no
        credentials."""
        _require_same_server(self.uri)
        found = {**_CLIENT, "max_retries": str(_RETRIES), "retry_timeout": f"{_RETRY_SECONDS}s"}
        return found | _endpoint(self.uri) | (_keys_for_delta_rs() if self.uri.startswith("s3://") else {})

    @property
    def spark_options(self) -> Mapping[str, str]:
        """Options for Spark (TableStore.spark_options). Raises InvalidSettings for a store that Spark cannot read
        here."""
        return s3a_options() if self._s3(self.uri) else {}

    @property
    def spark_uri(self) -> str:
        return f"s3a://{self._s3(self.uri)}"

    @cached_property
    def filesystem(self) -> fs.FileSystem:
        from millrace.storage.object_files import file_system

        return file_system(self.uri, self._objects)

    def delta(self, version: int | None = None) -> DeltaTable:
        from deltalake import DeltaTable

        return read_whole(self.uri, lambda: DeltaTable(self.uri, version=version, storage_options=dict(self.options)))

    def exists(self) -> bool:
        return bool(self.list(_LOG_FOLDER))

    def create(self, **options: Any) -> None:
        """Create the table (TableStore.create). Raises StoreCannotPublish if two writers could both win."""
        from deltalake import DeltaTable

        require_conditional_puts(self.uri)
        read_whole(self.uri, lambda: DeltaTable.create(self.uri, storage_options=dict(self.options), **options))

    def require_conditional_puts(self) -> None:
        require_conditional_puts(self.uri)

    def put(self, name: str) -> _Upload:
        return _Upload(self._objects, name)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self.put_new(name, data) is not None

    def put_new(self, name: str, data: bytes) -> str | None:
        if is_log_file(name):
            require_conditional_puts(self.uri)
        try:
            # Without repetitions: the refusal of a second request may be the answer to the first one.
            return _put_new(_single(self.uri), name, data)
        finally:
            if is_log_file(name):
                announce(self.uri)

    def read(self, name: str) -> bytes | None:
        return self._unless_missing(lambda: bytes(_obstore().get(self._objects, name).bytes()))

    def size(self, name: str) -> int | None:
        found = self._unless_missing(lambda: _obstore().head(self._objects, name))
        return None if found is None else int(found["size"])

    def list(self, folder: str, *, age: float = 0.0) -> list[str]:
        found = self._listed(folder)["objects"]
        before = time.time() - age
        old = (each["path"] for each in found if not age or each["last_modified"].timestamp() <= before)
        return sorted(path.rpartition("/")[2] for path in old)

    def folders(self) -> Sequence[str]:
        return sorted(each.rstrip("/").rpartition("/")[2] for each in self._listed("")["common_prefixes"])

    def list_log(self, after: str) -> Sequence[ListedObject]:
        def listed() -> list[Any]:
            parts = _obstore().list(self._objects, prefix=_LOG_FOLDER, offset=after or None, chunk_size=1000)
            return [each for part in parts for each in part]

        found = read_whole(self.uri, listed)
        names = [(each["path"].rpartition("/"), each["e_tag"] or "") for each in found]
        return [ListedObject(name, tag) for (folder, _, name), tag in names if folder.endswith(_LOG_FOLDER)]

    def read_tagged(self, name: str) -> tuple[bytes, str] | None:
        def read() -> tuple[bytes, str]:
            found = _obstore().get(self._objects, name)
            return bytes(found.bytes()), found.meta["e_tag"] or ""

        return self._unless_missing(read)

    def require_tagged_puts(self) -> None:
        require_tagged_puts(self.uri)

    def replace_tagged(self, name: str, data: bytes, tag: str) -> str | None:
        """Replace the small file `name` if `tag` is its tag. Return its new tag, or None if it has another.

        Raises StoreCannotPublish if the store ignores the condition. After an OSError the file may be replaced.
        """
        require_tagged_puts(self.uri)
        return _put_tagged(_single(self.uri), name, data, tag)

    def take(self, other: TableStore, name: str, how: Literal["copy", "link", "move"]) -> bool:
        if self.size(name) is not None:
            return True
        sink = self.put(name)
        try:
            with other.filesystem.open_input_stream(name) as source:
                while part := source.read(PART_BYTES):
                    sink.write(part)
            sink.sync()
        except FileNotFoundError:
            return False
        finally:
            sink.close()
        if how == "move":
            other.delete([name])
        return True

    def replace(self, name: str, data: bytes) -> None:
        with os_errors(name):
            _obstore().put(self._objects, name, data, use_multipart=False)

    def delete(self, names: Iterable[str]) -> None:
        for some in _portions(names, 1000):
            with os_errors(self.uri):
                try:
                    _obstore().delete(self._objects, some)
                except FileNotFoundError:  # Azure and Google stop at the first missing one; S3 ignores it
                    for name in some:
                        with suppress(FileNotFoundError):
                            _obstore().delete(self._objects, name)

    def sync(self, names: Iterable[str]) -> None:
        """Do nothing: an object is durable once it exists."""

    @contextmanager
    def lease(self) -> Iterator[None]:
        yield

    @contextmanager
    def alone(self) -> Iterator[bool]:
        yield False

    @staticmethod
    def _s3(uri: str) -> str:
        """Return bucket and prefix of an address on S3, the one kind of store that Spark reads here."""
        scheme, _, place = uri.partition("://")
        if scheme != "s3":
            raise InvalidSettings(
                f"Spark reads tables on S3 alone, not {uri}: read the collection with read() or a scanner instead"
            )
        return place

    @property
    def _objects(self) -> Any:
        return _retrying(self.uri)

    def _listed(self, folder: str) -> Any:
        return read_whole(self.uri, lambda: _obstore().list_with_delimiter(self._objects, prefix=folder or None))

    def _unless_missing(self, call: Callable[[], _T]) -> _T | None:
        try:
            return read_whole(self.uri, call)
        except FileNotFoundError:
            return None


class _Upload:
    """A new object: there as a whole once it is synced."""

    def __init__(self, objects: Any, name: str) -> None:
        self._objects, self._name = objects, name
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 - closed by close
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        """Do nothing: :meth:`sync` uploads the file."""

    def sync(self) -> int:
        size = self._file.tell()
        self._file.seek(0)
        with os_errors(self._name):
            _obstore().put(
                self._objects, self._name, self._file, chunk_size=PART_BYTES, use_multipart=size > 2 * PART_BYTES
            )
        return size

    def close(self) -> None:
        self.closed = True
        self._file.close()


def _obstore() -> Any:
    return import_optional("obstore")


def _retrying(uri: str) -> Any:
    _require_same_server(uri)
    return _client(uri, _RETRIES)


def _single(uri: str) -> Any:
    _require_same_server(uri)
    return _client(uri, 0)


@lru_cache(512)
def _client(uri: str, retries: int) -> Any:
    return _opened(uri, retries=retries)


def _require_same_server(uri: str) -> None:
    """Raise InvalidSettings if the environment names another server for `uri` than when this process first used it.

    Clients, handles and caches of the address would mix the files of two deployments.
    """
    first, now = _first_server(uri), s3_server()
    if first != now and uri.startswith("s3://"):
        raise InvalidSettings(
            f"this process has used {uri} at {first or 'Amazon'}, and AWS_ENDPOINT_URL names {now or 'Amazon'} now: use"
            " a process of its own for each server, or another prefix"
        )


def _endpoint(uri: str) -> dict[str, str]:
    """Return the option of obstore and delta-rs that names the server."""
    return {"aws_endpoint": found} if uri.startswith("s3://") and (found := s3_server()) else {}


@lru_cache(8192)
def _first_server(uri: str) -> str:
    return s3_server()


def _session() -> Any:
    """Return boto3's session if keys come from a profile or a web identity.

    None if the environment has keys, or if the machine's role gives them: obstore and delta-rs know these themselves.
    """
    names = ("AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN", "AWS_ENDPOINT_URL_STS")
    found = tuple(os.environ.get(name, "") for name in names)
    if os.environ.get("AWS_ACCESS_KEY_ID") or not any(found[:2]):
        return None
    return _boto3_session(found)


@lru_cache(8)
def _boto3_session(variables: tuple[str, ...]) -> Any:
    import_optional("boto3")
    import boto3  # type: ignore[import-untyped]

    with _asking_for_keys():
        return boto3.Session()


@contextmanager
def _asking_for_keys() -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

    try:
        yield
    except (BotoCoreError, ClientError, ValueError) as error:
        raise InvalidSettings(
            f"there are no credentials for S3 ({' '.join(str(error).split())[:300]}): check AWS_PROFILE, or"
            " AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE"
        ) from None


def _keys_for_delta_rs() -> dict[str, str]:
    """Return the keys that a profile or a web identity gives now, which delta-rs does not find by itself."""
    session = _session()
    if session is None:
        return {}
    with _asking_for_keys():
        credentials = session.get_credentials()
        if credentials is None:
            raise ValueError("the profile has none")
        keys = credentials.get_frozen_credentials()
    found = {
        "aws_access_key_id": keys.access_key,
        "aws_secret_access_key": keys.secret_key,
        "aws_session_token": keys.token,
        "aws_region": session.region_name,
    }
    return {name: value for name, value in found.items() if value}


def _opened(uri: str, *, retries: int) -> Any:
    more: dict[str, Any] = dict(_endpoint(uri))
    session = _session() if uri.startswith("s3://") else None
    if session is not None:
        from obstore.auth.boto3 import Boto3CredentialProvider

        with _asking_for_keys():
            # boto3 renews keys ten minutes before they expire; asked more rarely, it would give expired ones.
            more["credential_provider"] = Boto3CredentialProvider(session, ttl=timedelta(minutes=5))
    return import_optional("obstore.store").from_url(
        uri,
        client_options={**_CLIENT, "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")},
        retry_config={
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=10), "base": 2},
        },
        **more,
    )


def require_conditional_puts(uri: str) -> None:
    """Raise StoreCannotPublish unless a second put of the same name is refused, as commits rely on.

    A process tries it once for each bucket, before its first commit there. Raises OSError.
    """
    bucket = s3_server(), uri.split("/")[2]
    if bucket not in _CONDITIONAL:
        _try_conditional_puts(uri)
        _CONDITIONAL.add(bucket)


def require_tagged_puts(uri: str) -> None:
    """Raise StoreCannotPublish unless a put is refused once its file has another tag. Raises OSError.

    A process tries it once for each bucket, before its first such put.
    """
    bucket = s3_server(), uri.split("/")[2]
    if bucket not in _TAGGED:
        _try_tagged_puts(uri)
        _TAGGED.add(bucket)


_CONDITIONAL: Final[set[tuple[str, str]]] = set()
"""Servers and buckets that have passed :func:`require_conditional_puts`."""
_TAGGED: Final[set[tuple[str, str]]] = set()
"""Servers and buckets that have passed :func:`require_tagged_puts`."""


def _try_conditional_puts(uri: str) -> None:
    def refused(name: str) -> bool:
        _new_probe(uri, name)
        return _put_new(_single(uri), name, b"2") is None

    if not _probed(uri, refused):
        raise StoreCannotPublish(
            f"the store of {uri} lets a second writer replace a file (it ignores If-None-Match, or refuses every put"
            " with it): commits of several writers would overwrite each other. Use a store with conditional puts, such"
            " as S3 itself, MinIO or versitygw"
        )


def _try_tagged_puts(uri: str) -> None:
    def refused(name: str) -> bool:
        first = _new_probe(uri, name)
        if _put_tagged(_single(uri), name, b"2", first) is None:
            return False
        return _put_tagged(_single(uri), name, b"3", first) is None

    if not _probed(uri, refused):
        raise StoreCannotPublish(
            f"the store of {uri} replaces a file that has changed since it was read (it ignores If-Match, or refuses"
            " every put with it): a suspended process could overwrite its successor's journal. Use a store with"
            " conditional puts, such as S3 itself, MinIO or versitygw"
        )


def _new_probe(uri: str, name: str) -> str:
    """Create a file whose name nobody else has, and return its tag. Raises OSError."""
    tag = _put_new(_single(uri), name, b"1")
    if tag is None:  # S3 answers so, too, while it is busy with another request for the name
        raise StoreUnreachable(f"{name}: the store says that the file is there")
    return tag


def _probed(uri: str, refused: Callable[[str], bool]) -> bool:
    """Return the result of `refused` for the name of a new file, which is removed. Raises OSError."""
    for left in reversed(range(_PROBES)):
        name = f"{_PROBE}-{uuid.uuid4().hex}"
        try:
            return refused(name)
        except OSError as error:  # the outcome of that put is unknown: try under a new name
            if _UNKNOWN_HEADER in str(error):
                return False
            if not left:
                raise
            time.sleep(random.uniform(0, 1))
        finally:
            with os_errors(uri), suppress(FileNotFoundError):
                _obstore().delete(_retrying(uri), [name])
    raise AssertionError("the last try returns or raises")


def _put_new(objects: Any, name: str, data: bytes) -> str | None:
    """Create an object, and return its tag. Returns None if the name is taken."""
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    with os_errors(name):
        try:
            made = _obstore().put(objects, name, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return None
    return made["e_tag"] or ""


def _put_tagged(objects: Any, name: str, data: bytes, tag: str) -> str | None:
    """Replace an object that has the tag, and return its new one. Returns None if it has another, or is gone."""
    from obstore.exceptions import PreconditionError

    with os_errors(name):
        try:
            made = _obstore().put(objects, name, data, mode={"e_tag": tag}, use_multipart=False)
        except (PreconditionError, FileNotFoundError):
            return None
    return made["e_tag"] or ""


def _portions(names: Iterable[str], size: int) -> Iterator[list[str]]:
    found = list(names)
    for first in range(0, len(found), size):
        yield found[first : first + size]


def remove_old_uploads(uri: str, *, before: float, dry_run: bool = False) -> int:
    """Abort uploads in parts below `uri` that began before `before` (Unix seconds). Returns their number.

    A process that is killed within an upload leaves its parts, which no listing shows. Does nothing on other stores:
    Azure forgets parts by itself, and a rule of the bucket removes them on Google's (docs/object-stores.md). Raises
    OSError.
    """
    if not uri.startswith("s3://"):
        return 0
    bucket, _, prefix = uri.removeprefix("s3://").rstrip("/").partition("/")
    import_optional("boto3")
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    try:
        client = boto3.client("s3", endpoint_url=s3_server() or None, region_name=region)
        pages = client.get_paginator("list_multipart_uploads").paginate(
            Bucket=bucket, Prefix=f"{prefix}/" if prefix else ""
        )
        old = [
            (each["Key"], each["UploadId"])
            for page in pages
            for each in page.get("Uploads", [])
            if each["Initiated"].timestamp() < before
        ]
        for key, upload in [] if dry_run else old:
            with suppress(client.exceptions.NoSuchUpload):  # it ended meanwhile
                client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload)
    except (BotoCoreError, ClientError) as error:
        raise OSError(f"uploads below {uri}: {' '.join(str(error).split())[:500]}") from None
    return len(old)


def s3a_options() -> dict[str, str]:
    """Return how Spark's S3A (Hadoop) reaches S3 as this process does, by Hadoop's names.

    Credentials are not among them: the JVM finds its own in its environment, profile or role.
    """
    found = {
        "fs.s3a.aws.credentials.provider": "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",
        # The default stream reads ahead by a library that is of no use for files of this size.
        "fs.s3a.input.stream.type": "classic",
    }
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        found["fs.s3a.endpoint.region"] = region
    if algorithm := os.environ.get("AWS_SERVER_SIDE_ENCRYPTION"):  # of the checkpoints of streams, which Spark writes
        found["fs.s3a.encryption.algorithm"] = _S3A_ENCRYPTION.get(algorithm.lower(), algorithm)
        if key := os.environ.get("AWS_SSE_KMS_KEY_ID"):
            found["fs.s3a.encryption.key"] = key
    if endpoint := s3_server():
        found |= {"fs.s3a.endpoint": endpoint, "fs.s3a.path.style.access": "true"}
    return found
