"""What commands are made of: options, output, errors, signals.

No module here is a command; each beside this folder is.
"""
