"""The commands around training. Each is a module with `add_arguments(parser)` and `run(arguments,
overrides)`.

May import everything but cli, and torch only inside functions. Never has anything that training
needs."""
