"""Train every causal language model of the installed transformers: python
scripts/huggingface_table.py [--only llama,mamba2] [--out FILE.jsonl] [--table].

A small instance of each class takes two steps on 2 ranks with recomputation, is saved, resumes on 1
rank for two more, and is compared with four steps on 1 rank (SGD: a wrong scale shows). Its folder
is written and read by transformers, and the logits compared. The table also has the probe's answers
about the class. Results are appended to the file as they come, and a later run continues; --table
prints them for models/transformers/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import sys
import tempfile
import textwrap
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.jobs import full, started  # noqa: E402
from titanlite.config.job import Job, job_from  # noqa: E402
from titanlite.config.load import parse_command_line  # noqa: E402
from titanlite.errors import UserError  # noqa: E402
from titanlite.runtime.store import LocalPath  # noqa: E402
from titanlite.verify.pool import Pool  # noqa: E402

SETTINGS = """
    --training.seq_len=32 --training.local_batch_size=2 --training.global_batch_size=4
    --metrics.no_enable_tensorboard --validation.no_enable --generate.no_at_end --job.device=cpu
    --fault.no_preflight --debug.seed=3 --optimizer.name=SGD --optimizer.lr=0.05
    --lr_scheduler.warmup_steps=1 --lr_scheduler.total_steps=4 --model.name=transformers
    --model.flavor=hf
""".split()
SAVING = ["--checkpoint.enable", "--checkpoint.interval=2"]
NEEDED: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "xmod": {"default_language": "en_XX"},
}
"""Keys for classes whose default config builds no model, or none that runs."""
DECODER = {"is_decoder": True, "is_encoder_decoder": False}
"""With these, an encoder or encoder-decoder class becomes a decoder."""
ANSWERS = ("documents", "chunks", "compiles")
"""Questions of the class's probe; the answers are "yes" or the reason why not."""
BOUND = 1e-5
"""Largest error of a parameter after four steps in float32; scans and norms inside a class are in
float32, too.
"""


def job_of(kind: str, overrides: dict[str, Any], argv: list[str], world: int) -> Job:
    line = parse_command_line(["--config", "debug.toml", *SETTINGS, *argv], {})
    line.overrides["model.overrides"] = {"model_type": kind, **overrides}
    return job_from(line, world=world, training=True)


def train(kind: str, overrides: dict[str, Any], argv: list[str]) -> dict[str, torch.Tensor]:
    """Train on this rank of the pool; return the weights."""
    run = started(job_of(kind, overrides, argv, dist.get_world_size()))
    run.train()
    return {name: full(each) for name, each in run.parts[0].state_dict().items()}


def small_overrides(kind: str) -> dict[str, Any]:
    """Return the keys of a class's config.json that make it small."""
    from transformers import CONFIG_MAPPING

    from titanlite.models.transformers.flavor import flavor_of
    from titanlite.models.transformers.model import transformers_config
    from titanlite.models.transformers.probe import small_config

    declared = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[kind])}
    decoder = {k: v for k, v in DECODER.items() if declared.get(k) is not v and k in declared}
    config = transformers_config(flavor_of({"model_type": kind, **decoder}))
    default = config.to_dict()
    small = small_config(config)
    changed = {key: value for key, value in small.items() if value != default.get(key)}
    changed |= decoder | NEEDED.get(kind, {})
    return json.loads(json.dumps(changed).replace(": null", ': "none"'))


def reload(kind: str, overrides: dict[str, Any], weights: dict[str, torch.Tensor]) -> float:
    """Write the class's folder, let transformers read it, and return the error of its logits."""
    from transformers import AutoModelForCausalLM

    from titanlite.checkpoint.hf.export import write_folder
    from titanlite.checkpoint.hf.names import Translation, documents

    job = job_of(kind, overrides, [], 1)
    translation = Translation(job.spec, job.model_config)
    files = documents(translation.config, torch.float32, None)
    for name in translation.kept:  # zeros would show nothing
        if weights[name].is_floating_point():
            weights[name] += torch.rand_like(weights[name]) * (weights[name] == 0)
    model = job.spec.module(job.model_config, 32)
    model.load_state_dict(weights, strict=False)
    model.eval()
    with tempfile.TemporaryDirectory() as folder:
        target = LocalPath(folder, "hf")
        tensors = translation.hf_tensors(torch.float32)
        write_folder(target, tensors, files, lambda name: weights[name])
        theirs, info = AutoModelForCausalLM.from_pretrained(
            target, output_loading_info=True, dtype=torch.float32
        )
    if info["missing_keys"] or info["unexpected_keys"]:
        raise ValueError(f"missing {info['missing_keys']}, unexpected {info['unexpected_keys']}")
    tokens = torch.randint(4, job.shape.vocab_size, (2, 24))
    with torch.no_grad():
        return error_of(theirs(tokens, use_cache=False).logits, model(tokens))


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not found.is_floating_point():
        return float((found != expected).any())
    return float((found - expected).norm() / (expected.norm() or 1.0))


def check(kind: str, pool: Pool) -> dict[str, str]:
    """Return the results for one class, by column; a reason under "why" ends them."""
    from titanlite.models.transformers import as_json
    from titanlite.models.transformers.probe import probe

    seen: dict[str, str] = {}
    try:
        overrides = small_overrides(kind)
        seen |= probe(as_json(job_of(kind, overrides, [], 1).model_config))
        with tempfile.TemporaryDirectory() as folder:
            whole = [f"--job.dump_folder={folder}/whole", "--training.steps=4"]
            one = pool.run(train, kind, overrides, whole, world=1)[0]
            parts = [f"--job.dump_folder={folder}/parts", *SAVING]
            recomputed = [*parts, "--training.steps=2", "--activation_checkpoint.mode=full"]
            pool.run(train, kind, overrides, recomputed, world=2)
            two = pool.run(train, kind, overrides, [*parts, "--training.steps=4"], world=1)[0]
        worst = max(one, key=lambda name: error_of(two[name], one[name]))
        error = error_of(two[worst], one[worst])
        seen["trains"] = f"{error:.0e}" if error < BOUND else f"differs: {worst} by {error:.0e}"
        error = reload(kind, overrides, two)
        seen["folder"] = f"{error:.0e}" if error < BOUND else f"differs: logits by {error:.0e}"
    except Exception as error:
        seen["why"] = why(error)[:280]
    return seen


def why(error: Exception) -> str:
    """Return the line of an error, or of a rank's traceback, that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, UserError):
        return f"{type(error).__name__}: {' '.join(lines[:2])}"
    said = [at for at, line in enumerate(lines) if re.match(r"[\w.]+Error: |terminate ", line)]
    if not said:
        return f"{type(error).__name__}: {' '.join(lines[:1])}"
    return " ".join(lines[said[-1] :][:3])


def table(results: dict[str, dict[str, str]]) -> str:
    """Return the page's list of classes that work, by their answers, and its table of the rest."""
    works: dict[tuple[str, ...], list[str]] = {}
    fails: dict[str, list[str]] = {}
    for kind, seen in sorted(results.items()):
        if holds(seen):
            answers = tuple("yes" if seen[name] == "yes" else "no" for name in ANSWERS)
            works.setdefault(answers, []).append(kind + errors(seen))
        else:
            reason = seen.get("why") or next(v for v in seen.values() if v.startswith("differs"))
            reason = reason.replace("|", "/").replace(f" {kind} ", " it ")
            fails.setdefault(reason, []).append(kind)
    lines = []
    for answers, kinds in sorted(works.items(), reverse=True):
        title = ", ".join(map(" ".join, zip(ANSWERS, answers, strict=True)))
        item = f"- **{title}** ({len(kinds)}): {', '.join(kinds)}"
        lines += textwrap.wrap(item, 120, subsequent_indent="  ", break_on_hyphens=False)
    lines += ["", "| does not | reason |", "|---|---|"]
    lines += [f"| {', '.join(kinds)} | {reason} |" for reason, kinds in fails.items()]
    return "\n".join(lines)


def errors(seen: dict[str, str]) -> str:
    """Return the errors of a class that are not zero, as the list shows them."""
    found = [f"{name} {seen[name]}" for name in ("trains", "folder") if seen[name] != "0e+00"]
    return f" ({', '.join(found)})" if found else ""


def holds(seen: dict[str, str]) -> bool:
    return all(len(seen.get(name, "did not run")) < 8 for name in ("trains", "folder"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("huggingface_table.jsonl"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--minutes", type=float, default=1e9)
    arguments = parser.parse_args()
    results: dict[str, dict[str, str]] = {}
    if arguments.out.exists():
        for line in arguments.out.read_text().splitlines():
            entry = json.loads(line)
            results[entry.pop("kind")] = entry
    if arguments.table:
        print(table(results))
        return
    from titanlite.models.transformers.model import CLASSES

    warnings.simplefilter("ignore")
    end = time.monotonic() + 60 * arguments.minutes
    kinds = (
        arguments.only.split(",") if arguments.only else [k for k in CLASSES if k not in results]
    )
    preload = ["titanlite.verify.harness", "titanlite.models.transformers.model"]
    with closing(Pool(2, preload)) as pool:
        for kind in kinds:
            if time.monotonic() > end:
                break
            start = time.monotonic()
            with contextlib.redirect_stderr(sys.stdout):
                seen = check(kind, pool)
            with arguments.out.open("a") as file:
                file.write(json.dumps({"kind": kind, **seen}) + "\n")
            print(f"{kind} {time.monotonic() - start:.0f} s {seen}", flush=True)


if __name__ == "__main__":
    main()
