"""Holds checkpoints: saving, committing, verifying, loading and resuming; hf/ exchanges weights with Hugging Face.
May import parallel, data, observe, runtime, config, registry, layout and errors; not train, optim or above.
Never unpickles a file, never writes into a committed folder, and reaches files only through runtime/store.py."""
