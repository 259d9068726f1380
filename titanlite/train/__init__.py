"""One training process: the worker, the trainer's loop, one step, the losses, generation, and the
log.

May import everything but tools, verify, launch and planner. Never starts processes or chooses a
mesh.
"""
