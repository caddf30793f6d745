"""What strangers' steps make of documents, found out for the service by a process apart: a step may take for ever, and nobody can interrupt it.

`trying.py` is what the service asks; ``python -m millrace.pipelines.samples`` (`__main__.py`) is that process.
"""
