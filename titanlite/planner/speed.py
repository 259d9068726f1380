"""A bound on how fast a step can be. Imports no torch.

The bound is the largest of four times, each at full speed: of FLOPs, of the GPU memory's traffic,
of the links in a node, and of the network; in a job that offloads also of the host's memory, of its
links and of the disk."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

from titanlite.config.job import Job
from titanlite.config.layout import DIMENSIONS, Layout
from titanlite.planner.hardware import Hardware
from titanlite.planner.record import DISK, ON_HOST, Collective, Totals, views

COMPUTE = "compute"
MEMORY = "GPU memory"
LINK = "node link"
NETWORK = "network"
HOST = "host memory"

ASSUMED = (
    "attention is counted in full, as in MFU: a causal kernel may do half of it, "
    "which matters at long sequences",
)


@dataclass(frozen=True)
class Term:
    """A part of the bound: a resource's time for one type of FLOPs or one dimension of the mesh."""

    resource: str
    of: str
    amount: float
    """FLOPs or bytes of one GPU."""
    seconds: float


@dataclass(frozen=True)
class Speed:
    """The bound of a step in seconds."""

    terms: Sequence[Term]
    bound: float
    binding: str
    """The resource of the bound."""
    tokens: int
    """Tokens of a step, over all ranks."""
    world: int

    @property
    def tokens_per_gpu(self) -> float:
        """Return tokens per second and GPU."""
        return self.tokens / self.bound / self.world

    def days(self, tokens: float) -> float:
        """Return how many days a number of tokens takes."""
        return tokens / self.tokens * self.bound / 86400

    @property
    def order(self) -> tuple[float, float]:
        """Return the sort key of a search: the bound, then the sum of all terms, which it hides."""
        return self.bound, sum(term.seconds for term in self.terms)


def is_compiled(job: Job) -> bool:
    """Whether the blocks of the model are compiled."""
    return job.config.compile.enable and "model" in job.config.compile.components


def speed_of_job(job: Job, ranks: Sequence[Totals], hardware: Hardware) -> Speed:
    """Return the bound of a job's step: that of its slowest pipeline rank."""
    tokens = job.batch.total * job.config.training.seq_len
    speeds = [speed_of(totals, job.layout, hardware, tokens) for totals in ranks]
    return max(speeds, key=lambda speed: speed.bound)


def speed_of(totals: Totals, layout: Layout, hardware: Hardware, tokens: int) -> Speed:
    """Return the bound of a rank's step, in which all ranks together have `tokens` tokens."""
    terms = [*_terms(totals, layout, hardware)]
    seconds = defaultdict[str, float](float)
    for term in terms:
        seconds[term.resource] += term.seconds
    binding = max(seconds, key=lambda resource: seconds[resource])
    return Speed(terms, seconds[binding], binding, tokens, layout.world)


def _terms(totals: Totals, layout: Layout, hardware: Hardware) -> Iterator[Term]:
    """Yield the parts of the bound."""
    rates = {MEMORY: hardware.memory_rate, HOST: hardware.host_rate}
    rates |= {LINK: hardware.link_rate, NETWORK: hardware.network_rate}
    amounts = defaultdict[tuple[str, str], float](float)
    for dtype, flops in totals.flops.items():
        amounts[COMPUTE, dtype] += flops
    amounts[HOST, ""] = totals.moved[ON_HOST]
    amounts[MEMORY, ""] = totals.moved[""]
    for collective, size in totals.sent.items():
        of = collective.dimension
        if of == "host":  # each direction has its own rate
            rates[collective.kind] = hardware.node.host.link * 1e9
            amounts[collective.kind, of] += size
            continue
        near, far = traffic(collective, layout, hardware.node.gpus)
        # A switch that reduces, as NVLink's and InfiniBand's can, needs each byte of an all-reduce
        # only once.
        times = 1.0
        if collective.kind == "all-reduce":
            times = 0.5
        amounts[LINK, of] += times * near * size
        amounts[NETWORK, of] += times * far * size
    for (resource, of), amount in amounts.items():
        if not amount:
            continue
        rate = hardware.peak(of) if resource == COMPUTE else rates[resource]
        yield Term(resource, of, amount, amount / rate)
    size = totals.static.get(DISK)
    if size:
        yield Term(DISK, "optimizer", 2 * size, hardware.streaming(size))


@cache
def traffic(collective: Collective, layout: Layout, per_node: int) -> tuple[float, float]:
    """Return what a GPU sends over its link in the node, and what each NIC sends over the network,
    as fractions of a collective's bytes.

    In a group of n ranks, g of them in each node, a node lacks 1 - g/n of the tensor, which arrives
    over g NICs; a GPU gets 1 - 1/g from its node. An all-reduce is a reduce-scatter and a gather.
    """
    near = ranks_in_a_node(collective, layout, per_node)
    ranks = collective.ranks
    if collective.kind == "send-receive":
        if near < ranks:
            return 0, 1
        return 1, 0
    if collective.kind == "all-to-all":  # its bytes are those of one rank
        return (near - 1) / ranks, (ranks - near) / ranks
    passes = 1
    if collective.kind == "all-reduce":
        passes = 2
    return passes * (1 - 1 / near), passes * (1 - near / ranks) / near


def ranks_in_a_node(collective: Collective, layout: Layout, per_node: int) -> int:
    """Return how many ranks of a collective's group share a node; ranks of the last dimension are
    neighbors.
    """
    spanned = {*collective.dimension.split(" x ")}
    names = DIMENSIONS
    degrees = layout.degrees
    for view in views(layout):
        if spanned <= {*view[0]}:
            names, degrees = view
            break
    steps = []
    for position, (name, degree) in enumerate(zip(names, degrees, strict=True)):
        if name in spanned or collective.dimension == "world":
            steps.append([prod(degrees[position + 1 :]) * number for number in range(degree)])
    # A group within a dimension counts as the first ranks of it.
    members = [sum(step) for step in product(*steps)][: collective.ranks]
    return max(Counter(rank // per_node for rank in members).values())
