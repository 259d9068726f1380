"""The commands around training: a module each, with `add_arguments(parser)` and `run(arguments,
overrides)`.

May import everything but cli, and torch only inside functions. Never holds anything that training
needs."""
