"""How the tables of pipelines came to be, step by step (alembic)."""
