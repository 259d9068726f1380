"""Watching a run: hangs, the state of its processes, and requests to stop.

May import runtime and the floors below it. Never restarts anything; the launcher does.
"""
