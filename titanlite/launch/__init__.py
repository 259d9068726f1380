"""The launcher of `titanlite train`: cluster variables, machine check, rendezvous, workers,
terminal.

May import planner, train and everything below. Never puts a model on a device, reads data or joins
a process group."""
