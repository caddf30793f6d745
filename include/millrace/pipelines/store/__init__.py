"""Management's data on pipelines in one SQL database: versions, roles, quotas, an audit log, encrypted secrets."""
