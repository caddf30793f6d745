"""Operations: maintenance work that people and schedules start beside the streaming jobs.

Each operation has a folder. Its `declaration.py` is light and is what a DAG imports; the other modules do the work. The
modules here are shared: :mod:`.operation` (declaration, parameters, reports), :mod:`.registry` (lookup by name),
:mod:`.entry` (the process that runs one operation).
"""
