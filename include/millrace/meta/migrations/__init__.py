"""Alembic migrations of the SQL meta store: one module of ``versions/`` per step, never changed afterwards."""
