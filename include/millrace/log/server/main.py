"""The log server: one process that owns a folder's log, or fronts a broker's, and serves it over Arrow Flight.

    python -m millrace.log.server.main --data <folder> [--backend kafka://host:9092/prefix]

Clients find it through `server.json` (millrace.rpc.discovery) and normally start it themselves
(millrace.rpc.remote_log). The wire protocol:

- DoExchange: each record batch is one append, each metadata message its acknowledgement, in order (append_stream,
  millrace.rpc.wire).
- DoGet: entries (ENTRY_SCHEMA). One call waits at most ReadLimits.max_wait; the client repeats it.
- Actions: a JSON object in, one out. The registry (millrace.rpc.calls) lists all calls, with their keys.
- A command, ticket or action that names an extension (`{"extension": <name>, ...}`, `"<name>/<action>"`) goes to that
  extension.

Every call carries a token: that of `server.json` or of MILLRACE_SERVER_TOKEN, which may do everything, or one of the
data folder's token file (millrace.access.token_file), which may do what millrace.rpc.calls says. Any other call is
refused unread. Flight has received the request by then, so an unauthenticated connection may send no more than 1 MiB
(millrace.log.server.connections, which also limits connections and streams).

SIGTERM, SIGINT and `shutdown` stop it cleanly: it answers new appends "not taken", finishes appends in flight, closes
the log, and removes `server.json`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow as pa

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.access.access_log import AccessLog
from millrace.access.token_file import TokenFile
from millrace.base.data_folder import prepare_data_folder, restrict_umask
from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidSettings, MillraceError
from millrace.base.file_lock import LockedFile, exclusive_lock
from millrace.base.files import rotate_log
from millrace.base.settings import Settings, following
from millrace.log.generations.service import open_deployment_log
from millrace.log.generations.shared_list import shared_list
from millrace.log.protocol import LogService
from millrace.log.server.connections import ConnectionLimits
from millrace.log.server.flight import Extension, LogServer
from millrace.rpc.discovery import (
    LOCK_FILE,
    OUTPUT_FILE,
    RECORD_FILE,
    STARTUP_ERROR,
    ServerRecord,
    remove_record,
    write_record,
)
from millrace.rpc.launch import ServerLaunch
from millrace.rpc.wire import TOKEN_VARIABLE, error_to_bytes
from millrace.runtime.process_setup import stop_on_signals

_LEAST_TOKEN: Final = 16
OUTPUT_BYTES: Final = 16 << 20
"""Size at which `server.log` is rotated to `server.log.1`."""

_log = logging.getLogger(__name__)


def serve(folder: Path, launch: ServerLaunch, *, lock_timeout: float = 10.0) -> None:
    """Serve the log of `folder` (or of the launch's backend) until SIGTERM, SIGINT, a shutdown call or the
    idle timeout.

    Call it from the main thread.
    Raises LogBusy if another server still holds the folder after `lock_timeout` seconds.
    Raises InvalidSettings, UnsafeDataFolder, and errors of opening the log.
    """
    stop = stop_on_signals()
    extensions = [_imported(path) for path in launch.extensions]
    prepare_data_folder(folder)
    with exclusive_lock(folder / LOCK_FILE, deadline=Deadline.after(lock_timeout)) as lock:
        settings = following(replace(Settings.load(), data_dir=folder.absolute().parent))
        service = open_deployment_log(
            folder, launch.backend, settings=dict(launch.settings), shared=shared_list(settings)
        )
        try:
            if service.names():
                service.file.ensure_written()
            hosted = [extension(service, folder) for extension in extensions]
            # The token must exist before the address does, and the record needs both.
            draft = ServerRecord.of_this_process("")
            server = LogServer(
                service,
                tokens=[draft.token, *shared_token()],
                token_file=TokenFile(folder.absolute().parent),
                extensions=hosted,
                connections=_limits(launch),
                host=launch.host,
                port=launch.port,
                tls=_certificates(launch),
                stop_asked=stop,
                access_log=AccessLog.of(settings),
            )
        except pa.ArrowException as error:
            service.close()
            raise InvalidSettings(f"the log server cannot listen at {launch.host}:{launch.port}: {error}") from error
        except BaseException:
            service.close()
            raise
        record = replace(draft, address=server.address)
        if launch.tls is not None:
            record = replace(record, roots=str(Path(launch.tls[0]).absolute()), tls_name=launch.tls[2])
        published: LockedFile | None = None
        try:
            published = write_record(folder, record)
            _log.info("serving %s at %s as process %d", launch.backend or folder, record.address, record.pid)
            while not stop.is_set():
                _bound_output(folder / OUTPUT_FILE)
                if not _is_at(folder / LOCK_FILE, lock):
                    _log.error("stopping: %s was removed or replaced while the server ran", folder / LOCK_FILE)
                    break
                published = _republish(folder, record) or published
                if launch.idle_timeout is not None and server.idle_seconds > launch.idle_timeout:
                    _log.info("stopping: idle for %.1f s", launch.idle_timeout)
                    break
                stop.wait(0.2)
        finally:
            server.close()
            remove_record(folder, record)  # before the lock is released: a record without a lock belongs to a copy
            if published is not None:
                published.close()
            _log.info("stopped")


def shared_token() -> list[str]:
    """Return the token for clients on other hosts from the environment, if it is set.

    Raises InvalidSettings for a weak one.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and len(token) < _LEAST_TOKEN:
        raise InvalidSettings(
            f"{TOKEN_VARIABLE} has {len(token)} characters: give it at least {_LEAST_TOKEN} random ones"
        )
    return [token] if token else []


def _certificates(launch: ServerLaunch) -> tuple[bytes, bytes] | None:
    """Return certificate chain and key of the launch.

    Raises InvalidSettings.
    """
    if launch.tls is None:
        return None
    chain, key, _ = launch.tls
    try:
        return Path(chain).read_bytes(), Path(key).read_bytes()
    except OSError as error:
        raise InvalidSettings(f"the log server's certificate or key cannot be read: {error}") from error


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Return whether an open file is still the one at `path`.

    If it is not, its lock keeps nobody out: another server may run in a new folder of the same name, and what this one
    appends is in files without a name.
    """
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
    except OSError:
        return True  # unknown: asked again


def _republish(folder: Path, record: ServerRecord) -> LockedFile | None:
    """Write `server.json` again if it was removed: a server that no client finds would hold the folder for ever."""
    if not (folder / RECORD_FILE).exists():
        try:
            published = write_record(folder, record)
            _log.warning("%s was removed while the server runs: writing it again", folder / RECORD_FILE)
            return published
        except OSError:
            pass  # a full disk: retried later
    return None


def _bound_output(output: Path) -> None:
    """Rotate the file of this process's output, if its starter set one."""
    try:
        if os.path.samestat(os.fstat(2), output.stat()):
            rotate_log(output, OUTPUT_BYTES)
    except OSError:
        pass  # no such file, or a full disk: retried later


def _limits(launch: ServerLaunch) -> ConnectionLimits:
    usual = ConnectionLimits()
    return replace(usual, connections=launch.connections or usual.connections, streams=launch.streams or usual.streams)


def _imported(path: str) -> Callable[[LogService, Path], Extension]:
    module, _, function = path.partition(":")
    try:
        found: Callable[[LogService, Path], Extension] = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidSettings(f"{path!r} is not an extension: use module:function ({error})") from error
    return found


def _launch(arguments: Sequence[str] | None) -> tuple[Path, ServerLaunch, bool]:
    """Parse the command line: folder, launch, and whether a person reads the output.

    The other options are those that ServerLaunch.arguments writes.
    """
    parser = argparse.ArgumentParser(
        prog="python -m millrace.log.server.main", description="Serve a folder's log to other processes."
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FOLDER", help="folder of the log and server.json")
    add("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    add("--port", type=int, default=0, help="port to bind (default: a free one)")
    add("--idle-timeout", type=float, metavar="SECONDS", help="stop after this time without a client (default: never)")
    add("--tls-cert", metavar="FILE", help="certificate chain (PEM): serve with TLS")
    add("--tls-key", metavar="FILE", help="key of the certificate (PEM)")
    add("--tls-name", default="localhost", help="name in the certificate (default: %(default)s)")
    add(
        "--backend", default="", metavar="URL", help="serve this broker's log (default: the embedded one in the folder)"
    )
    add("--connections", type=int, metavar="N", help="maximum number of connections")
    add("--streams", type=int, metavar="N", help="maximum number of append streams")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the backend")
    add("--extension", action="append", default=[], metavar="MODULE:FUNCTION", help="extension to host")
    add("--foreground", action="store_true", help="report a failed start to a person, not to a starter")
    options = parser.parse_args(arguments)
    settings = []
    for item in options.set:
        name, equals, value = item.partition("=")
        if not equals:
            parser.error(f"--set {item}: write NAME=VALUE")
        settings.append((name, value))
    if (options.tls_cert is None) != (options.tls_key is None):
        parser.error("--tls-cert and --tls-key must be given together")
    launch = ServerLaunch(
        host=options.host,
        port=options.port,
        idle_timeout=options.idle_timeout,
        tls=None if options.tls_cert is None else (options.tls_cert, options.tls_key, options.tls_name),
        backend=options.backend,
        connections=options.connections,
        streams=options.streams,
        settings=tuple(settings),
        extensions=tuple(options.extension),
    )
    return options.data, launch, options.foreground


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve as the command line says. A failed start prints one line.

    Without --foreground, the starter turns that into the typed error.
    """
    restrict_umask()
    folder, launch, foreground = _launch(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        serve(folder, launch)
    except MillraceError as error:
        message = f"{error.code}: {error}" if foreground else f"{STARTUP_ERROR}{error_to_bytes(error).decode()}"
        sys.stderr.write(f"{message}\n")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    # Threads of streams that clients hold open would block a normal exit. The log is closed, so exit at once.
    os._exit(code)
