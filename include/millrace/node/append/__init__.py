"""The append host: follows each PChannel's log once for all clients and answers appends in milliseconds."""
