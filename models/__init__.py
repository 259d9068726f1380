"""The model zoo: one folder per registered model, and in common the layers that they share.

May import torch, registry and errors. Never imports another model than common, or the config.
"""
