"""Operations: what people and schedules do to a running Millrace beside the streaming jobs.

One folder an operation (`declaration.py` is light and is what a DAG imports; the work is in the modules beside it), and what
they share here: :mod:`.operation` (declaration, parameters, reports), :mod:`.registry` (which there are), :mod:`.entry` (the job around one).
"""
