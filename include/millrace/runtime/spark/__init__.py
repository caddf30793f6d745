"""Spark for jobs and operations: Delta's jars, the session, the slots that bound concurrent sessions, its workers."""
