"""A TorchX component: one launcher per node, which starts one worker per GPU.

TorchX ignores exit codes and starts a run again whatever ended it, up to three times. Under SLURM
its --kill-on-bad-exit may cut short a save of the last nodes, which scripts/slurm/train.slurm does
not.

    torchx run -s slurm scripts/torchx/titanlite.py:train --nodes 2 -- --config llama_8b.toml
    torchx run -s kubernetes -cfg queue=default scripts/torchx/titanlite.py:train --image IMAGE -- \
--config …
"""

import shlex

import torchx.specs as specs


def train(
    *args: str, image: str, nodes: int = 2, gpus: int = 8, cpus: int = 96, gib: int = 1024
) -> specs.AppDef:
    """Train the job of `args`, the arguments of `titanlite train`.

    Args:
        args: --config FILE.toml and --section.key value
        image: a container's name; under SLURM the checkout, where the `titanlite` on the path runs
        nodes: how many
        gpus: per node
        cpus: per node
        gib: memory per node
    """
    # Each scheduler has node 0's name in another variable, which only a shell can read. On node 0
    # there may be none.
    master = f"MASTER_ADDR=$${{{specs.macros.rank0_env}:-localhost}}"
    role = specs.Role(
        name="node",
        image=image,
        entrypoint="sh",
        args=["-c", f"{master} exec titanlite train {shlex.join(args)}"],
        env={"NNODES": str(nodes), "NODE_RANK": specs.macros.replica_id},
        num_replicas=nodes,
        resource=specs.Resource(cpu=cpus, gpu=gpus, memMB=gib << 10),
        max_retries=3,
        retry_policy=specs.RetryPolicy.APPLICATION,  # all nodes, since they also stop together
    )
    return specs.AppDef(name="titanlite", roles=[role])
