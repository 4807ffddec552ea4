# The engine: the model, KV memory, the scheduler. Built from the repository's root by compose.yaml, with PyTorch's CPU
# build; compose.gpu.yaml gives it other arguments, for an NVIDIA GPU.
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS build
WORKDIR /src
RUN python3 -m venv /opt/streamkv
ENV PATH=/opt/streamkv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
# Where PyTorch's CPU build lies; empty: where everything else does, whose build has CUDA. Wheels in the build context
# `wheels` go first, and no network is needed for those.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Of pyproject.toml's optional dependencies: gpu, or none.
ARG EXTRAS=
COPY constraints.txt ./
RUN --mount=from=wheels,target=/wheels \
    if ls /wheels/torch-*.whl >/dev/null 2>&1; then pip install --constraint constraints.txt --find-links /wheels "$TORCH"; \
    else pip install --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$TORCH"; fi
COPY pyproject.toml README.md LICENSE ./
COPY streamkv streamkv
COPY engine engine
COPY gateway gateway
RUN --mount=from=wheels,target=/wheels \
    pip install --constraint constraints.txt --find-links /wheels ".${EXTRAS:+[$EXTRAS]}"

FROM ${PYTHON}
# Debian packages. Triton compiles what launches its kernels, so on a GPU it needs a C compiler.
ARG PACKAGES=
RUN if [ -n "$PACKAGES" ]; then apt-get update && apt-get install -y --no-install-recommends $PACKAGES && \
    rm -rf /var/lib/apt/lists/*; fi
LABEL org.opencontainers.image.title="StreamKV engine" org.opencontainers.image.licenses=Apache-2.0
COPY docker/passwd docker/group /etc/
COPY --from=build /opt/streamkv /opt/streamkv
COPY --chown=10001:10001 --chmod=0700 docker/empty /run/streamkv
COPY --chown=10001:10001 --chmod=0700 docker/empty /cache
COPY --chown=10001:10001 --chmod=0700 docker/empty /kv
ENV PATH=/opt/streamkv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 \
    STREAMKV_CACHE=/cache HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton \
    STREAMKV_ENDPOINT=ipc:///run/streamkv/engine.sock
USER 10001:10001
VOLUME ["/cache", "/kv", "/run/streamkv"]
# From SIGTERM on, live streams have 30 s, then the cache is written to disk.
STOPSIGNAL SIGTERM
ENTRYPOINT ["streamkv", "engine", "--supervise"]
HEALTHCHECK --start-period=2h --start-interval=5s --interval=15s --timeout=10s --retries=20 \
    CMD ["streamkv", "health", "--engine"]
