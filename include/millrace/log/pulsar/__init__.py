"""Pulsar as the log: a PChannel is a topic of the deployment's namespace, read by positions, administered through the broker's REST API."""
