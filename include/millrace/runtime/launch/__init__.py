"""Launched jobs: a folder a run, a lock that says whether it lives, a history of what ended.

Begin with `launcher.py`.
"""
