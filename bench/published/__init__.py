"""Published tables: their log (`commits.py`), the key index (`key_index.py`), the publisher (`publishing.py`)."""
