"""What a launcher's checks have opened and built, for the ranks that are forked from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from titanlite.data.sources import DatasetPlace, Source
from titanlite.data.tokenizer import Tokenizer
from titanlite.parallel.build import Converter, ParameterTable


@dataclass
class Prepared:
    """Parts of a job; a rank builds what is missing."""

    tokenizer: Tokenizer | None = None
    sources: dict[DatasetPlace, Source] = field(default_factory=dict)
    converters: Sequence[Converter] = ()
    model: tuple[nn.Module, ParameterTable] | None = None
    """The whole model on the meta device, and its table."""
