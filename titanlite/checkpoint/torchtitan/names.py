"""Names of a model's tensors in TorchTitan's checkpoints. No torch."""

from typing import Any

from titanlite.registry import ModelSpec, WeightTransform

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""
_STATE = "optimizer.state."
_OTHERS = ("optimizer", "lr_scheduler", "dataloader", "train_state")


class Names:
    """Translates between `model.NAME` and `optimizer.NAME.KEY` here and the keys there."""

    def __init__(self, spec: ModelSpec, flavor: Any) -> None:
        self.form, self._rules = spec.torchtitan(flavor), spec.rules(flavor)
        self.ties = {rule.tied: rule.pattern for rule in self._rules if rule.tied}
        """Second names of tensors, which TorchTitan stores twice, and their first."""

    def ours(self, key: str) -> str:
        """Return our name of a key; none of what is no tensor of ours."""
        for wrapper in WRAPPERS:
            key = key.replace(wrapper, "")
        if key.startswith(_STATE):
            name, _, kind = key.removeprefix(_STATE).rpartition(".")
            return "" if name in self.ties else f"optimizer.{self._renamed(name)}.{kind}"
        is_weight = key.partition(".")[0] not in _OTHERS and key not in {
            *self.ties,
            *self.form.zeros,
        }
        return f"model.{self._renamed(key)}" if is_weight else ""

    def theirs(self, name: str) -> str:
        """Return the key of one of our names."""
        first, _, rest = name.partition(".")
        if first == "model":
            return self._renamed(rest, back=True)
        rest, _, kind = rest.rpartition(".")
        return f"{_STATE}{self._renamed(rest, back=True)}.{kind}"

    def via(self, name: str) -> tuple[WeightTransform, ...]:
        """Return the transforms from one of our tensors to theirs."""
        if not self.form.rotates_halves:
            return ()
        first, _, rest = name.partition(".")
        parameter = rest if first == "model" else rest.rpartition(".")[0]
        return next((rule.via for rule in self._rules if rule.match(parameter) is not None), ())

    def _renamed(self, name: str, back: bool = False) -> str:
        for ours, theirs in self.form.names.items():
            here, there = (ours, theirs) if back else (theirs, ours)
            if name.endswith(here):
                return name.removesuffix(here) + there
        return name
