"""The management of pipelines: calls, and the HTTP routes of these calls."""
