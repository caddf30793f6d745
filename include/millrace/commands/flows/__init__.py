"""``millrace flows``: list, check, run and manage flows, whichever host runs them."""

from importlib import import_module

for _name in ("overview", "running", "positions", "letters", "capture", "service", "old_names"):  # the help's order
    import_module(f"{__name__}.{_name}")
