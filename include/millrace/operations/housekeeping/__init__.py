"""Housekeeping: remove what the system wrote about itself once it is older than its retention."""
