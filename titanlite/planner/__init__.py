"""The cost of a config and its placement on any mesh, without its processes and without a GPU.

May import train and the floors below it. Never starts a process or trains.
"""
