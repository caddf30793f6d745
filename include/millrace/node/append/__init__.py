"""The append host: follows each PChannel's log once for all its clients, and answers appends in milliseconds. Begin with `host.py`."""
