"""Training data: tokenizers, token sources, preparation, windows, sample order, streams and
loaders.

May import runtime, config, registry and errors. Never looks at the model, the device mesh or
the trainer: callers pass ranks and positions as numbers.
"""
