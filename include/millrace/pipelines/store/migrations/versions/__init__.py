"""The steps, in the order of their `down_revision`."""
