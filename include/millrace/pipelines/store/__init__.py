"""What management keeps of pipelines: one SQL database, transactions, versions, roles, quotas, an audit log, encrypted secrets."""
