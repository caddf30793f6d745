"""Published tables: the key index (`key_index.py`)."""
