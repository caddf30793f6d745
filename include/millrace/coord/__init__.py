"""Decide who owns what: terms of PChannels, the catalog of collections, DDL broadcasts, assignment of roles to
nodes.
"""
