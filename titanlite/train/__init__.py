"""One training process: the worker, the trainer's loop, one step, the losses, generation, and what is logged.

May import everything but tools, verify, launch and planner. Never starts processes or chooses a mesh.
"""
