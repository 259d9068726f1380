"""What the checks of a launcher have opened and built: ranks that are forked from it begin with
it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from titanlite.data.sources import Place, Source
from titanlite.data.tokenizer import Tokenizer
from titanlite.parallel.build import Converter, Table


@dataclass
class Prepared:
    """Each part is the job's own; what is missing, a rank makes itself."""

    tokenizer: Tokenizer | None = None
    sources: dict[Place, Source] = field(default_factory=dict)
    converters: Sequence[Converter] = ()
    model: tuple[nn.Module, Table] | None = None
    """The whole model on the meta device, and its table."""
