# An image of megapar: docker build -t megapar . ; docs/launching.md says how to run it.
# torch from the default index has CUDA's libraries with it, so a host needs only NVIDIA's driver and container toolkit.
# It runs on CPUs too. For a smaller image without CUDA: docker build --build-arg TORCH_INDEX=ADDRESS -t megapar . , where
# ADDRESS is that of PyTorch's index of CPU builds.
FROM python:3.11-slim

ARG TORCH_INDEX=""

# Triton compiles a small C file before it starts a kernel. NCCL opens libibverbs for InfiniBand and RoCE, and uses TCP
# without it; the providers are the drivers of network cards. No version is pinned: Debian keeps only the newest.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers \
    && rm -rf /var/lib/apt/lists/*

# For Amazon's EFA: docker build --build-arg EFA=1.51.0, a version of its release notes. It has libfabric and NCCL's plugin
# aws-ofi-nccl. The kernel's part is on the host, so the installer leaves it out, as it does limits and the look for cards.
ARG EFA=""
RUN if [ -n "$EFA" ]; then set -eu; \
        apt-get update; apt-get install --yes --no-install-recommends curl ca-certificates; \
        curl --fail --silent --show-error --output /tmp/efa.tar.gz \
            "https://efa-installer.amazonaws.com/aws-efa-installer-$EFA.tar.gz"; \
        tar -xzf /tmp/efa.tar.gz -C /tmp; cd /tmp/aws-efa-installer; \
        ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify; \
        rm -rf /tmp/efa.tar.gz /tmp/aws-efa-installer /var/lib/apt/lists/*; \
        find /opt/amazon -name 'libnccl-net*.so' -printf '%h\n' | sort -u > /etc/ld.so.conf.d/nccl-net.conf; ldconfig; \
        ldconfig -p | grep libnccl-net; \
    fi

WORKDIR /opt/megapar
COPY constraints.txt ./
# CPU builds of torch bring no triton, and kernels are interpreted by this one.
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0 \
    && (python -c "import triton" || pip install --no-cache-dir triton==3.9.0)
COPY setup.py pyproject.toml README.md LICENSE ./
COPY megapar ./megapar
COPY models ./models
COPY kernels ./kernels
COPY tools ./tools
COPY pretrain_scripts ./pretrain_scripts
RUN pip install --no-cache-dir --constraint constraints.txt '.[convert,data]'

# Not root, and any other user too (docker run --user): caches go to /tmp, and torch finds a name for a user without one.
RUN useradd --uid 1000 megapar && install --directory --owner megapar /runs
USER 1000
ENV HOME=/tmp USER=megapar
WORKDIR /runs
ENTRYPOINT ["megapar"]
CMD ["--help"]
