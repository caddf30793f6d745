"""Shared parts of commands: options, output, errors, signals. The modules beside this folder are the commands."""
