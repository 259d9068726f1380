"""How fast a recorded step can be at most, and how fast it is likely to be. No torch.

The bound is the largest of four sums, each at full speed: FLOPs, traffic of the GPU's memory, of
the links in a node, of the network. The estimate puts the operations, in their order and at the
efficiencies of hardware.toml, on three lanes: compute, gathers of parameters, reductions of
gradients. Ranks of a pipeline wait for what others send: a step is the longest chain."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product
from math import prod

from titanlite.config.job import Job
from titanlite.layout import DIMENSIONS, Layout
from titanlite.planner.hardware import Hardware
from titanlite.planner.record import DISK, ON_HOST, Collective, Event, Operation, Recording, views

MEMORY, LINK, NETWORK = "GPU memory", "node link", "network"
HOST = "host memory"
LANES = COMPUTE, GATHERS, REDUCTIONS, WAITING = "compute", "gathers", "reductions", "waiting"
SENDS = "sends"
"""A further lane, of a pipeline's ranks, and of collectives that overlap with a matrix product."""

_ALWAYS_ASSUMED = (
    "attention is counted in full, as in MFU: a causal kernel may do half of it, "
    "which matters at long sequences",
    "the estimate leaves out latencies, input data and the host; "
    "elementwise operations are part of an efficiency",
)


@dataclass(frozen=True)
class Term:
    """A part of the bound: a resource's time for a type of FLOPs or a dimension of the mesh."""

    resource: str
    of: str
    amount: float
    """FLOPs or bytes of one GPU."""
    seconds: float


@dataclass(frozen=True)
class Span:
    """What a lane of the estimate does from one second of the step to another."""

    lane: str
    what: str
    """A phase, or the dimension of a collective."""
    start: float
    end: float


@dataclass(frozen=True)
class Speed:
    """A step's bound and estimate in seconds."""

    terms: Sequence[Term]
    bound: float
    binding: str
    """The resource of the bound."""
    estimate: float
    exposed: Mapping[str, float]
    """Seconds of the estimate that compute waits for collectives, by dimension."""
    spans: Sequence[Span]
    starts: Sequence[float | None]
    """When compute begins with each phase of the step; None if it has nothing to do there."""
    tokens: int
    """In a step, of all ranks."""
    world: int
    assumptions: Sequence[str]

    def tokens_per_gpu(self, step_seconds: float) -> float:
        """Return tokens per second and GPU."""
        return self.tokens / step_seconds / self.world

    def days(self, tokens: float, step_seconds: float) -> float:
        """Return how many days a number of tokens takes."""
        return tokens / self.tokens * step_seconds / 86400


def is_compiled(job: Job) -> bool:
    """Whether the blocks of the model are compiled."""
    return job.config.compile.enable and "model" in job.config.compile.components


def speed_of_job(job: Job, ranks: Sequence[Recording], hardware: Hardware) -> list[Speed]:
    """Return the bound and the estimate of a job's recorded step, on each pipeline rank."""
    tokens = job.batch.total * job.config.training.seq_len
    # The gather of one sequence is not fused (torch 2.13).
    hidden = ("reduce-scatter", "all-gather")[: job.batch.local]
    hidden *= job.config.parallelism.enable_async_tensor_parallel
    compiled, rank_of = is_compiled(job), job.stages.rank_of
    return speed_of(ranks, job.layout, hardware, tokens, compiled, rank_of, hidden)


def speed_of(
    ranks: Sequence[Recording],
    layout: Layout,
    hardware: Hardware,
    tokens_per_step: int,
    compiled: bool = False,
    rank_of: Mapping[int, int] | None = None,
    hidden: Collection[str] = (),
) -> list[Speed]:
    """Return the bound and the estimate of a recorded step, on each pipeline rank; `compiled`
    chooses among the efficiencies, `rank_of` has the rank of each stage, `hidden` are the kinds of
    tensor parallel's collectives that overlap with the product next to them.
    """
    schedules = [_Schedule(layout, hardware, compiled, hidden) for _ in ranks]
    done: dict[Event, float] = {}
    running = []
    for number, (recording, schedule) in enumerate(zip(ranks, schedules, strict=True)):
        running.append(_run(recording, schedule, number, rank_of or {}, done))
    while running:  # each as far as what it needs is done
        before = len(done), len(running)
        running = [run for run in running if next(run, None)]
        assert before != (len(done), len(running)), "ranks wait for each other"
    terms = [[*_terms(recording, layout, hardware)] for recording in ranks]
    bounds = [*map(_bound, terms)]
    bound, binding = max(bounds)
    disk = max(recording.static.get(DISK, 0) for recording in ranks)
    steps = (schedule.finish() + hardware.streaming(disk) for schedule in schedules)
    estimate = max(bound, *steps)
    return [
        Speed(
            terms[bounds.index((bound, binding))],
            bound,
            binding,
            estimate,
            schedule.exposed,
            schedule.spans,
            schedule.starts,
            tokens_per_step,
            layout.world,
            [*hardware.assumptions(schedule.efficiencies), *_ALWAYS_ASSUMED],
        )
        for schedule in schedules
    ]


def _bound(terms: Sequence[Term]) -> tuple[float, str]:
    """Return the largest sum of a resource's terms, and the resource."""
    seconds: dict[str, float] = defaultdict(float)
    for term in terms:
        seconds[term.resource] += term.seconds
    binding = max(seconds, key=lambda resource: seconds[resource])
    return seconds[binding], binding


def _run(
    recording: Recording,
    schedule: "_Schedule",
    rank: int,
    rank_of: Mapping[int, int],
    done: dict[Event, float],
) -> Iterator[Event]:
    """Schedule a rank's step, and yield each event that waits for another rank, until that is done.

    `done` has the end of every send, and when each rank came to the rest of its step."""
    for event, operations in groupby(recording.operations, lambda operation: operation.event):
        needed = list[Event]()
        if event and event.kind == "rest":
            done[Event("rest", rank)] = schedule.now
            needed = [Event("rest", other) for other in {*rank_of.values()}]
        elif event and event.kind in ("F", "B", "I"):
            step, kind = (-1, "send F") if event.kind == "F" else (1, "send B")
            source = event.stage + step
            if rank_of.get(source, rank) != rank:
                needed = [Event(kind, source, event.micro_batch)]
        while event and any(one not in done for one in needed):
            yield event
        for one in needed:
            schedule.wait_until(done[one])
        for operation in operations:
            collective = operation.collective
            if event and collective and collective.kind == "send-receive" and event.stage >= 0:
                done[event] = schedule.send(operation.phase, collective)
            else:
                schedule.add(operation)


@cache
def traffic(collective: Collective, layout: Layout, per_node: int) -> tuple[float, float]:
    """Return the bytes that a GPU sends over its link in the node, and those per NIC over the
    network.

    Of a group of n ranks, g in each node, a node lacks 1 - g/n of the tensor, which comes over g
    NICs; a GPU gets 1 - 1/g of it from its node. An all-reduce is a reduce-scatter and a gather.
    """
    near = ranks_in_a_node(collective, layout, per_node)
    ranks = collective.ranks
    size = collective.bytes
    if collective.kind == "send-receive":
        return (0, size) if near < ranks else (size, 0)
    if collective.kind == "all-to-all":  # `bytes` are those of one rank
        return size * (near - 1) / ranks, size * (ranks - near) / ranks
    passes = 2 if collective.kind == "all-reduce" else 1
    return passes * size * (1 - 1 / near), passes * size * (1 - near / ranks) / near


def ranks_in_a_node(collective: Collective, layout: Layout, per_node: int) -> int:
    """Return how many ranks of a collective's group are in one node: the last dimension's ranks are
    neighbors.
    """
    spanned = {*collective.dimension.split(" x ")}
    names, degrees = next(
        (view for view in views(layout) if spanned <= {*view[0]}), (DIMENSIONS, layout.degrees)
    )
    steps = []
    for position, (name, degree) in enumerate(zip(names, degrees, strict=True)):
        if name in spanned or collective.dimension == "world":
            steps.append([prod(degrees[position + 1 :]) * number for number in range(degree)])
    # A part of a dimension is its first ranks.
    members = [sum(step) for step in product(*steps)][: collective.ranks]
    return max(Counter(rank // per_node for rank in members).values())


def transfer(collective: Collective, layout: Layout, hardware: Hardware) -> tuple[float, str]:
    """Return the seconds of a collective, by its slower link and that link's efficiency, and which
    link it is.
    """
    if collective.dimension == "host":
        rate = hardware.node.host.link * 1e9 * hardware.efficiencies["link"].share
        return collective.bytes / rate, collective.kind  # both directions at once
    near, far = traffic(collective, layout, hardware.node.gpus)
    in_node = near / hardware.link_rate / hardware.efficiencies["link"].share
    between = far / hardware.network_rate / hardware.efficiencies["network"].share
    return max((in_node, LINK), (between, NETWORK))


def _terms(recording: Recording, layout: Layout, hardware: Hardware) -> Iterator[Term]:
    """Yield the parts of the bound."""
    rates = {MEMORY: hardware.memory_rate, HOST: hardware.host_rate}
    rates |= {LINK: hardware.link_rate, NETWORK: hardware.network_rate}
    amounts: dict[tuple[str, str], float] = defaultdict(float)
    for operation in recording.operations:
        amounts[COMPUTE, operation.dtype] += operation.flops
        amounts[HOST if _is_on_host(operation) else MEMORY, ""] += _moved(operation)
    for collective, count in recording.collectives().items():
        of = collective.dimension
        if of == "host":  # both directions at once
            rates[collective.kind] = hardware.node.host.link * 1e9
            amounts[collective.kind, of] += count * collective.bytes
            continue
        # A switch that reduces, as NVLink's and InfiniBand's can, needs each byte of an all-reduce
        # only once.
        count /= 2 if collective.kind == "all-reduce" else 1
        near, far = traffic(collective, layout, hardware.node.gpus)
        amounts[LINK, of] += count * near
        amounts[NETWORK, of] += count * far
    for (resource, of), amount in amounts.items():
        if amount:
            rate = hardware.peak(of) if resource == COMPUTE else rates[resource]
            yield Term(resource, of, amount, amount / rate)
    if size := recording.static.get(DISK):
        yield Term(DISK, "optimizer", 2 * size, hardware.streaming(size))


def _moved(operation: Operation) -> int:
    """Return the bytes of memory traffic that no compiler can fuse away: of matrix products, of
    the update, and on the host.
    """
    counts = operation.flops or operation.phase == "optimizer" or _is_on_host(operation)
    return operation.moved if counts else 0


def _is_on_host(operation: Operation) -> bool:
    return operation.phase.endswith(ON_HOST)


class _Schedule:
    """A list schedule of a step as FSDP2's streams would have it.

    A gather starts when its predecessor has been taken by compute; compute waits for it where its
    result is read first. A reduction starts where it was recorded, after its predecessor, and
    compute leaves the backward pass when all are done. Every other collective is a part of compute,
    but for hidden ones: a gather goes on during the product that reads it, a reduction began with
    the product that it reduces. Collectives that need the same link take turns."""

    def __init__(
        self, layout: Layout, hardware: Hardware, compiled: bool, hidden: Collection[str]
    ) -> None:
        self.layout, self.hardware, self.compiled = layout, hardware, compiled
        self.hidden = hidden
        self.now = self.product = 0.0  # how far compute is, and where its last product began
        self.arriving: Span | None = None  # a gather that goes on during the next product
        # When lanes and links have finished their work.
        self.free: dict[str, float] = defaultdict(float)
        self.gathers: list[Span] = []  # not taken by compute yet
        self.reduction: Span | None = None
        self.taken = 0.0
        self.exposed: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self.phase = ""
        self.starts: list[float | None] = []
        self.efficiencies: set[str] = set()

    def send(self, phase: str, collective: Collective) -> float:
        """Return when what a stage sends arrives; compute goes on."""
        self._enter(phase)
        return self._communicate(SENDS, collective, self.now).end

    def wait_until(self, time: float) -> None:
        """Wait for other ranks of the pipeline."""
        self._wait_for(Span(SENDS, "pp", time, time))

    def _enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self.starts.append(None)

    def add(self, operation: Operation) -> None:
        self._enter(operation.phase)
        in_backward = operation.phase.startswith("backward")
        if not in_backward and self.reduction:
            self._wait_for(self.reduction)
            self.reduction = None
        if not operation.collective:
            if operation.awaits and self.gathers:
                self._wait_for(self.gathers.pop(0))
                self.taken = self.now
            self._compute(operation)
            return
        collective = operation.collective
        is_data_parallel = operation.is_fsdp or "dp" in collective.dimension
        is_gather = is_data_parallel and collective.kind == "all-gather"
        if is_gather or collective.kind == "to GPU":
            if self.gathers and self.gathers[-1].what == "host":
                self.gathers.pop()  # the copies of a group, and its gather, are awaited together
            self.gathers.append(self._communicate(GATHERS, collective, self.taken))
        elif collective.kind == "from GPU":
            self.reduction = self._communicate(REDUCTIONS, collective, self.now)
        elif is_data_parallel and in_backward:
            if self.reduction and collective.kind == "reduce-scatter":
                self._wait_for(self.reduction)  # FSDP2 keeps the input of one reduce-scatter
            self.reduction = self._communicate(REDUCTIONS, collective, self.now)
        elif collective.dimension == "tp" and collective.kind in self.hidden:
            if collective.kind == "all-gather":
                self.arriving = self._communicate(SENDS, collective, self.now)
            else:
                self._wait_for(self._communicate(SENDS, collective, self.product))
        else:
            self._wait_for(self._communicate(COMPUTE, collective, self.now))

    def finish(self) -> float:
        """Return when the last lane is done."""
        return max([self.now, *self.free.values()])

    def _compute(self, operation: Operation) -> None:
        hardware, on_host = self.hardware, _is_on_host(operation)
        seconds = _moved(operation) / (hardware.host_rate if on_host else hardware.memory_rate)
        if operation.flops:
            rate = self.hardware.peak(operation.dtype) * self._share(operation.dtype)
            seconds = max(seconds, operation.flops / rate)
        elif seconds:
            seconds /= self._share("memory")
        if not seconds:
            return
        start = self.now
        self.now += seconds
        if operation.flops:
            self.product = start
        if self.starts[-1] is None:
            self.starts[-1] = start
        last = self.spans[-1] if self.spans else None
        if last and last.lane == COMPUTE and last.what == operation.phase and last.end == start:
            start = self.spans.pop().start
        self.spans.append(Span(COMPUTE, operation.phase, start, self.now))
        if operation.flops and self.arriving:
            self._wait_for(self.arriving)
            self.arriving = None

    def _communicate(self, lane: str, collective: Collective, earliest: float) -> Span:
        """Schedule a collective on its lane, and on the slower of the links that it uses."""
        seconds, link = transfer(collective, self.layout, self.hardware)
        self.efficiencies.add({LINK: "link", NETWORK: "network"}.get(link, "host"))
        lane_free = self.now if lane == COMPUTE else self.free[lane]
        start = max(earliest, lane_free, self.free[link])
        span = Span(lane, collective.dimension, start, start + seconds)
        self.free[lane] = self.free[link] = span.end
        self.spans.append(span)
        return span

    def _wait_for(self, span: Span) -> None:
        if span.end > self.now:
            idle_until = span.start if span.lane == COMPUTE else span.end
            if idle_until > self.now:
                self.spans.append(Span(WAITING, "", self.now, idle_until))
            self.exposed[span.what] += span.end - self.now
            self.now = span.end

    def _share(self, of: str) -> float:
        key = self.hardware.efficiency_of(of, self.compiled)
        self.efficiencies.add(key)
        return self.hardware.efficiencies[key].share
