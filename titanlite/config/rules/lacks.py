"""Keys whose needs are not met: they are refused, or have no effect."""

from collections.abc import Iterable
from itertools import chain

from titanlite.config.layout import Batch, Layout
from titanlite.config.rules.check import Check, Refusals
from titanlite.config.schema import KEYS, NEEDS, JobConfig, is_set, with_values
from titanlite.config.section import Condition, MeshCondition, Needs


def apply_rules(check: Check) -> None:
    """Refuse keys whose unmet needs would change the numbers, or what is loaded or saved."""
    for key, declared in NEEDS.items():
        for needs in declared:
            if needs.why:
                check.apply(_unmet_need, check.config, key, needs)


def _unmet_need(config: JobConfig, key: str, needs: Needs) -> Refusals:
    if not is_set(config, key):
        return
    for need in needs.conditions:
        assert isinstance(need, Condition), "a refusal cannot depend on the mesh"
        if not need.holds(config):
            remedy = "remove the key"
            if need.key:
                remedy = f"set {need.key}, or remove the key"
            yield key, f"{need.lack} {needs.why}; {remedy}"


def idle_keys(config: JobConfig, layout: Layout, batch: Batch) -> dict[str, str]:
    """Return the keys of a valid config that have no effect, each with the reason."""
    idle = dict[str, str]()
    for key, declared in NEEDS.items():
        if not is_set(config, key):
            continue
        for need in chain.from_iterable(needs.conditions for needs in declared):
            if isinstance(need, MeshCondition):
                holds = need.holds(config, layout, batch)
                lack = "on 1 rank" if layout.world == 1 and need.by_ranks else need.lack
            else:
                holds = need.holds(config)
                lack = need.lack
            if not holds:
                idle[key] = lack
                break
    return idle


def resolve(config: JobConfig, idle: Iterable[str], reshard: str) -> JobConfig:
    """Return a config with the defaults of idle keys, and with what "auto" stands for."""
    values = {key: KEYS[key].default for key in idle if key in KEYS}
    if config.parallelism.fsdp_reshard_after_forward == "auto":
        values.setdefault("parallelism.fsdp_reshard_after_forward", reshard or "default")
    return with_values(config, values)
