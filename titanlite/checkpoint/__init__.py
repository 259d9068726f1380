"""Holds checkpoints: saving, committing, verifying, loading and resuming.

The folder hf exchanges weights with Hugging Face. May import parallel, data, observe, runtime,
config, registry, layout and errors; not train, optim or above. Never unpickles a file or writes
into a committed folder; only runtime/store.py and safetensors open files."""
