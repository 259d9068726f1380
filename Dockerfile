# titanlite for GPU nodes: docker build -t titanlite .
#   docker run --gpus all --ipc host --stop-timeout 90 -v "$PWD:/work" titanlite train --config llama_8b.toml
# torch brings CUDA and NCCL, so the node needs only the driver and NVIDIA's container toolkit. With InfiniBand also
# --network host --device /dev/infiniband --ulimit memlock=-1; EFA needs AWS's image, with the lines from COPY on.
FROM python:3.12-slim-bookworm

# gcc is for Triton, which compiles a launcher for each kernel; ibverbs for NCCL over InfiniBand and RoCE.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev git ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

COPY . /opt/titanlite
RUN pip install --no-cache-dir '/opt/titanlite[hf,remote,wandb]'

# The run's folder, data and config; mounted, so that checkpoints outlive the container.
WORKDIR /work
# A stop of the container is a request to save and stop, which fault.grace_seconds bounds.
STOPSIGNAL SIGTERM
ENTRYPOINT ["titanlite"]
CMD ["--help"]
