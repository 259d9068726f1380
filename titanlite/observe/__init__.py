"""What a run shows of itself: metrics and their sinks, console, step clock, memory, profiler, run folder.

May import runtime, config, models, registry and what lies below.
Never reads data, takes part in a step, or makes the device wait.
"""
