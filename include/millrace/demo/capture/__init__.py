"""``make run CDC=1``: databases that are written to, and the collections that follow them."""
