"""The interceptors, one folder each with `interceptor.py`.

`millrace.wal.chain.build_interceptors` puts them in order.
"""
