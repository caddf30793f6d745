"""The schema migrations of the pipelines' tables (alembic)."""
