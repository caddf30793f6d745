"""Copies of the meta store in each machine's data folder: catalog, settings, tokens, news."""
