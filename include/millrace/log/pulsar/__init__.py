"""Pulsar as the log: a PChannel is a topic of the deployment's namespace, administered through the broker's
REST API.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _own_pybind11() -> Iterator[None]:
    """Keep what is imported inside from sharing pybind11's registry with other libraries.

    Libraries of one pybind11 version share it through the interpreter's dictionary. With pulsar-client from 3.9 on,
    every error of DuckDB would become a RuntimeError.
    """
    shared = _interpreter_dictionary()
    hidden = {key: shared.pop(key) for key in _registries(shared)}
    try:
        yield
    finally:
        for key in _registries(shared):
            shared[f"millrace {key}"] = shared.pop(key)  # its libraries go on using it
        shared.update(hidden)


def _interpreter_dictionary() -> dict[object, object]:
    """Return the dictionary in which C extensions store per-interpreter data."""
    api = ctypes.pythonapi
    current = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyInterpreterState_Get", api))
    dictionary = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("PyInterpreterState_GetDict", api))
    # The call returns a borrowed reference; a cast takes one of its own.
    found: dict[object, object] = ctypes.cast(dictionary(current()), ctypes.py_object).value
    return found


def _registries(shared: dict[object, object]) -> list[str]:
    return [key for key in shared if isinstance(key, str) and key.startswith("__pybind11_internals")]


with _own_pybind11():
    import pulsar  # noqa: F401
