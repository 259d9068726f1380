"""Write adapters to a folder in the format of the peft package."""

import json
from collections.abc import Callable

import torch

from titanlite.checkpoint.commit import staging_folder
from titanlite.checkpoint.hf.files import write
from titanlite.checkpoint.hf.names import Translation
from titanlite.errors import UserError, some_of
from titanlite.registry import Transposed
from titanlite.registry.lora import adapter_of
from titanlite.runtime.store import LocalPath


def export_adapters(
    target: LocalPath, translation: Translation, fetch: Callable[[str], torch.Tensor], base: str
) -> None:
    """Write the adapters of a model, whose other weights are in the folder or repository `base`."""
    adapters = translation.adapters
    if adapters is None:
        raise UserError("--format peft: the run has no adapters (lora.rank = 0)")
    tensors = dict[str, torch.Tensor]()
    modules = list[str]()
    refused = []
    for matrix, rule in translation.table.items():
        a, b = adapter_of(matrix)
        if a not in translation.shapes:
            continue
        if rule.part.of > 1 or any(isinstance(transform, Transposed) for transform in rule.via):
            refused.append(matrix)
            continue
        module = rule.hf_name(matrix).removesuffix(".weight")
        rows = fetch(b).float()
        for transform in rule.via:  # permutes the rows of B like those of the matrix
            rows = transform.to_hf(rows)
        tensors[f"base_model.model.{module}.lora_A.weight"] = fetch(a).float().contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = rows.contiguous()
        modules.append(module)
    if refused:
        joined = "which its Hugging Face form joins or transposes; use --format hf, merged"
        raise UserError(f"--format peft: {joined}:{some_of(refused)}")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": modules,  # peft silently drops adapters of other modules
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with staging_folder(target, None, f"the export to {target}") as staging:
        write(staging.local() / "adapter_model.safetensors", tensors)
        (staging / "adapter_config.json").put(json.dumps(config, indent=2).encode())
        target.publish(staging)
