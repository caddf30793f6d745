"""Registers Millrace's plugin with Airflow, which looks for plugin classes in the files of this folder."""

from __future__ import annotations

from millrace_airflow.plugin import MillracePlugin

__all__ = ["MillracePlugin"]
