"""The management service of flows: API, store, roles and deployment (docs/pipelines.md)."""
