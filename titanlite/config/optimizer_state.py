"""Where a config keeps the optimizer's state, and in which type. Imports no torch."""

from titanlite.config.schema import JobConfig


def place_of_state(config: JobConfig) -> str:
    """Return "device" (with the parameters), "host" or "disk"."""
    place = config.optimizer.state_on
    if place == "host" and config.training.enable_cpu_offload:
        return "device"  # which is the host
    return place


def state_dtype(config: JobConfig) -> str:
    """Return the type in which the optimizer computes its state; bfloat16 state is then rounded."""
    if config.optimizer.state_dtype == "float32":
        return "float32"
    return config.training.dtype


def is_wider(config: JobConfig) -> bool:
    """Whether the state has a wider type than the parameters."""
    return state_dtype(config) == "float32" and config.training.dtype == "bfloat16"


def streams_state(config: JobConfig) -> bool:
    """Whether each step brings the state to its parameters, or these to its type."""
    return is_wider(config) or place_of_state(config) != "device"
