"""Run untrusted steps on documents in a sandboxed process, since an endless step cannot be interrupted otherwise.

`trying.py` is the service's side; ``python -m millrace.flows.samples`` (`__main__.py`) is the sandboxed process.
"""
