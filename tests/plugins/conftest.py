"""Airflow's environment of the test run stands before anything here imports airflow."""

from __future__ import annotations

from tests.airflow_home import HOME as HOME
