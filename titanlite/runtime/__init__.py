"""What every rank builds on: cluster variables, process groups, seeds, files, and torch's private
names.

May import config, registry and errors. Never imports a technique, a model or a checkpoint.
"""
