#!/usr/bin/env bash
# One node of a run under ft_launcher, from NVIDIA's resiliency extension (pip install nvidia-resiliency-ext), with hot
# spare nodes and checks of GPUs and network cards, for hundreds of nodes. On every node, from the checkout:
#   NNODES=2 NGPU=8 MASTER_ADDR=node07 ./scripts/ft_launcher/train.sh --config llama_8b.toml
# docs/reliability.md, "Under torchrun or srun", says what titanlite's own launcher does and this one does not.
set -euo pipefail
exec ft_launcher --nnodes="${NNODES:?}" --nproc-per-node="${NGPU:?}" --max-restarts="${MAX_RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="${MASTER_ADDR:?}:${MASTER_PORT:-29500}" -m titanlite.train "$@"
