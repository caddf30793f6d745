"""Pulsar as the log: a PChannel is a topic of the deployment's namespace, administered through the broker's
REST API.
"""
