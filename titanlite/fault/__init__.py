"""What a worker notices about a run that goes wrong, so that all ranks stop at the same step.

May import runtime and what lies below it. Never restarts anything: that is the launcher's.
"""
