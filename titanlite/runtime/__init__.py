"""What every rank stands on: cluster variables, process groups, seeds, files, and torch's private names.

May import config, registry, layout and errors. Never knows a technique, a model's training or a checkpoint.
"""
