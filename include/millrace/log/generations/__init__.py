"""A deployment's log over the backends that have held it, in order; `service.py` is the one place where a log
is opened.
"""
