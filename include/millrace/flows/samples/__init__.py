"""Run strangers' steps on documents in a sandbox: a step may take for ever, and nothing else can interrupt it.

`trying.py` is the service's side; ``python -m millrace.flows.samples`` (`__main__.py`) is the sandboxed process.
"""
