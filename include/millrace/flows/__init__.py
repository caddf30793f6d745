"""Any source, any sink: what both sides promise, and the kinds there are."""
