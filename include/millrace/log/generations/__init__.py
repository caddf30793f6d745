"""A deployment's log over the backends that hold it, one after the other; `service.py` is the one place where a log is opened."""
