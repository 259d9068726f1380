"""Train thirteen fixed runs, models x meshes, for four steps each and print their losses and
gradient norms in full.

    python scripts/fixed_runs.py > before.txt       # and after a change: the two files are equal

Equal files prove that a change does not alter numbers. About two minutes on two cores.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

P = "--parallelism."
BFLOAT16 = "--training.mixed_precision_param=bfloat16"
RUNS = {
    "llama3, 1 rank": ("1", []),
    "llama3, dp2, accumulation": ("2", ["--training.global_batch_size=16"]),
    "llama3, dp2 x tp2": ("4", [P + "tensor_parallel_degree=2"]),
    "llama3, HSDP 2 x 2, recomputed": (
        "4",
        [P + "data_parallel_replicate_degree=2", "--activation_checkpoint.mode=selective"],
    ),
    "llama3, pp2, 1F1B": ("2", [P + "pipeline_parallel_degree=2"]),
    "llama3, cp2, documents": ("2", [P + "context_parallel_degree=2", "--training.document_mask"]),
    "gpt2, dp2, Muon": (
        "2",
        ["--model.name=gpt2", "--optimizer.name=Muon", "--model.overrides.dropout=0.1"],
    ),
    "gpt2, pp2 x dp2": ("4", ["--model.name=gpt2", P + "pipeline_parallel_degree=2"]),
    "qwen3, dp2, chunked loss": ("2", ["--model.name=qwen3", "--training.loss_chunks=4"]),
    "qwen3 with experts, ep2": (
        "2",
        ["--model.name=qwen3", "--model.flavor=debugmodel_moe", P + "expert_parallel_degree=2"],
    ),
    "llama3, 1 rank, bfloat16": ("1", [BFLOAT16]),
    "llama3, 2 replicas, bfloat16": ("2", [BFLOAT16, P + "data_parallel_replicate_degree=2"]),
    "qwen3 with experts, dp2, bfloat16, recomputed": (
        "2",
        [
            BFLOAT16,
            "--model.name=qwen3",
            "--model.flavor=debugmodel_moe",
            "--activation_checkpoint.mode=full",
        ],
    ),
}
COMMON = [
    "--training.steps=4",
    "--training.seq_len=64",
    "--training.local_batch_size=4",
    "--training.mixed_precision_param=float32",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=1",
    "--checkpoint.no_enable",
    "--validation.no_enable",
    "--generate.no_at_end",
    "--debug.seed=7",
]


def main() -> None:
    for name, (ranks, options) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "titanlite",
                "train",
                *COMMON,
                *options,
                f"--job.dump_folder={folder}",
            ]
            environ = {**os.environ, "NGPU": ranks, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(
                    f"{name}: exit code {done.returncode}\n"
                    f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
                )
            records = [
                json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()
            ]
            values = [
                f"{record['loss']!r} {record['grad_norm']!r}"
                for record in records
                if "loss" in record
            ]
            print(f"{name}: {'; '.join(values)}", flush=True)


if __name__ == "__main__":
    main()
