"""The migration steps, ordered by their `down_revision`."""
