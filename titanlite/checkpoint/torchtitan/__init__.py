"""Exchange of checkpoints with TorchTitan, in the format of torch's DCP: names, reading, writing.
May import the rest of checkpoint and the rooms below it. Never runs code from a folder: from its
pickle only a few classes are created."""
