"""The parrot, with a fault on one rank at one step."""

import os
import signal
import time

import torch
import torch.distributed as dist
from parrot.model import Parrot


class Faulty(Parrot):
    calls = 0

    def forward(self, tokens, positions=None, documents=None, head=None) -> torch.Tensor:
        rank, step, kind = os.environ["FAULT"].split(":")
        self.calls += 1
        logits = super().forward(tokens, positions, documents, head)
        if dist.get_rank() == int(rank) and self.calls == int(step):
            if kind == "raise":
                raise ValueError("a fault was put in here")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "sleep":
                time.sleep(1000)
            return logits * float("nan")
        return logits
