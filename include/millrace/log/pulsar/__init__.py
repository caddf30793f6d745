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
    api = ctypes.pythonapi
    current = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyInterpreterState_Get", api))
    dictionary = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(("PyInterpreterState_GetDict", api))
    shared = dictionary(current())
    kept = _registries(shared)
    try:
        yield
    finally:
        _registries(shared)
        shared.update(kept)


def _registries(shared: dict[object, object]) -> dict[object, object]:
    """Take pybind11's registries out of the interpreter's dictionary, and return them."""
    return {key: shared.pop(key) for key in list(shared) if str(key).startswith("__pybind11_internals")}


with _own_pybind11():
    import pulsar  # noqa: F401
