"""The migrations of the SQL meta store, by alembic: one module of ``versions/`` a step, none ever changed again."""
