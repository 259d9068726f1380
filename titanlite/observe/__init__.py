"""The visible side of a run: metrics and their sinks, console, step clock, memory, profiler, run
folder.

May import runtime, config, models, registry and the floors below.
Never reads data, takes part in a step, or makes the device wait.
"""
