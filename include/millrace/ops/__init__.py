"""Operations: what people and schedules do to a running Millrace beside the streaming jobs.

One folder an operation (`params.py` is light and is what a DAG imports; the work is in the modules beside it), and what
they share here: :mod:`.operation` (parameters, reports, progress) and :mod:`.entry` (the Spark job around an operation).
"""
