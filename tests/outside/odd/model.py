"""The parrot, with a buffer that differs on every rank."""

import torch
import torch.distributed as dist
from parrot.model import Parrot


class Odd(Parrot):
    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.register_buffer("table", torch.zeros(3), persistent=False)

    def reset_buffers(self) -> None:
        self.table.fill_(dist.get_rank())
