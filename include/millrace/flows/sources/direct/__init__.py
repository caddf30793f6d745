"""Messages of UDP and ZeroMQ sockets, at most once (docs/direct-messaging.md)."""
