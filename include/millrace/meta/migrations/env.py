"""Alembic's environment: runs the missing steps in the transaction of the given connection."""

from __future__ import annotations

from alembic import context

context.configure(
    connection=context.config.attributes["connection"], version_table="meta_version", transactional_ddl=True
)
context.run_migrations()
