"""DuckDB with its delta extension, in a process of its own.

Once the extension (1.5.5) is loaded, all errors of DuckDB are RuntimeErrors in that process, and other tests rely on
their types. The process ends when its standard input does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pyarrow as pa


@cache
def _process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def ask(sql: str) -> pa.Table:
    """Return the result of a query. Raises RuntimeError with DuckDB's words."""
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(sql).encode() + b"\n")
    process.stdin.flush()
    said = json.loads(process.stdout.readline())
    if "error" in said:
        raise RuntimeError(said["error"])
    return pa.ipc.open_stream(process.stdout.read(said["bytes"])).read_all()


def stop() -> None:
    """End the process, if one was started."""
    if _process.cache_info().currsize:
        process = _process()
        process.communicate(timeout=30)
        _process.cache_clear()


def main() -> None:
    import duckdb
    import duckdb_extension_delta

    connection = duckdb.connect()
    connection.execute("SET timezone = 'UTC'")
    (extension,) = Path(duckdb_extension_delta.__file__).parent.rglob("*.duckdb_extension")
    connection.load_extension(str(extension))
    for line in sys.stdin.buffer:
        data = b""
        try:
            found = connection.execute(json.loads(line)).to_arrow_table()
        except Exception as error:
            said: dict[str, object] = {"error": f"{type(error).__name__}: {error}"}
        else:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, found.schema) as writer:
                writer.write_table(found)
            data = sink.getvalue().to_pybytes()
            said = {"bytes": len(data)}
        sys.stdout.buffer.write(json.dumps(said).encode() + b"\n" + data)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
