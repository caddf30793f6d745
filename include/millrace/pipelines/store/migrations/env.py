"""What alembic runs: the steps that are missing, in the transaction of the connection that it was given."""

from __future__ import annotations

from alembic import context

context.configure(
    connection=context.config.attributes["connection"], version_table="pipeline_schema", transactional_ddl=True
)
context.run_migrations()
