"""Holds the exchange with TorchTitan's checkpoints, which torch's DCP wrote: names, and reading.
May import the rest of checkpoint and the rooms below that.
Never runs code of a folder: of its pickle only a few classes are made."""
