"""The public interface to declare models, optimizers, converters and sinks, and register them by
name.

May import errors and the standard library (pydantic late). Never imports torch, a model, or
anything above.
"""

from titanlite.registry.hf import (
    Box,
    Conversion,
    FusedSlice,
    HuggingFace,
    Rotary,
    TorchTitan,
    Transposed,
    WeightTransform,
)
from titanlite.registry.model import ModelDims, ModelSpec
from titanlite.registry.register import (
    OptimizerSpec,
    SinkSpec,
    find_converter,
    get_model,
    get_optimizer,
    get_sink,
    model_names,
    register_converter,
    register_model,
    register_optimizer,
    register_sink,
)
from titanlite.registry.rule import (
    Init,
    Role,
    Rule,
    assign,
    expert_paths,
    normal,
    ones,
    zeros,
)
