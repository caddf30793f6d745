"""Launched jobs: one folder for each run, a lock that shows whether the job lives, and a history of ended runs.

Start with `launcher.py`.
"""
