"""Why a segment takes no more inserts: one file a policy; `registry.py` puts them in the order in which they are asked."""
