"""The interceptors of the reference documents, one folder each with `interceptor.py`; `links.py` puts them in order."""
