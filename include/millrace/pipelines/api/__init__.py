"""The management of pipelines: what people ask of them, as calls, and those calls as routes."""
