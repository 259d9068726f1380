"""Holds checkpoints: saving, committing, verifying, loading and resuming; in hf and torchtitan the
exchange with others. May import parallel, data, observe, runtime, config, registry, layout and
errors; not train, optim or above. Never unpickles a file except for torch's .metadata, or writes
into a committed folder; only runtime/store.py, safetensors and torch's DCP open files."""
