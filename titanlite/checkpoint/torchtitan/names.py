"""Names of a model's tensors in TorchTitan's checkpoints. Imports no torch."""

from typing import Any

from titanlite.registry import ModelSpec, WeightTransform

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing insert into names."""
_STATE = "optimizer.state."
_OTHERS = ("optimizer", "lr_scheduler", "dataloader", "train_state")


class Names:
    """Translates between `model.NAME` or `optimizer.NAME.KEY` and TorchTitan's keys."""

    def __init__(self, spec: ModelSpec, flavor: Any) -> None:
        self.form = spec.torchtitan(flavor)
        self._rules = spec.rules(flavor)
        self.ties = {rule.tied: rule.pattern for rule in self._rules if rule.tied}
        """The first name for each second name of a tensor, which TorchTitan stores twice."""

    def ours(self, key: str) -> str:
        """Return our name for a key, or an empty string if it is not one of our tensors."""
        for wrapper in WRAPPERS:
            key = key.replace(wrapper, "")
        if key.startswith(_STATE):
            name, _, kind = key.removeprefix(_STATE).rpartition(".")
            if name in self.ties:
                return ""
            return f"optimizer.{self._renamed(name)}.{kind}"
        if key.partition(".")[0] in _OTHERS or key in self.ties or key in self.form.zeros:
            return ""
        return f"model.{self._renamed(key)}"

    def theirs(self, name: str) -> str:
        """Return TorchTitan's key for one of our names."""
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
        parameter = rest
        if first != "model":
            parameter = rest.rpartition(".")[0]
        return next((rule.via for rule in self._rules if rule.match(parameter) is not None), ())

    def _renamed(self, name: str, back: bool = False) -> str:
        for ours, theirs in self.form.names.items():
            here, there = (ours, theirs) if back else (theirs, ours)
            if name.endswith(here):
                return name.removesuffix(here) + there
        return name
