"""Published tables: their log (`commits.py`), the key index (`key_index.py`), the publisher (`publishing.py`), and
reads on top of a published version (`visible_reads.py`).
"""
