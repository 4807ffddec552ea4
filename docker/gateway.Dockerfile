# The gateway: HTTP, SSE, WebSocket, tokenizer. No PyTorch. Built from the repository's root by compose.yaml.
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS build
WORKDIR /src
RUN python3 -m venv /opt/streamkv
ENV PATH=/opt/streamkv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
COPY constraints.txt docker/gateway.txt ./
RUN --mount=from=wheels,target=/wheels pip install --constraint constraints.txt --find-links /wheels -r gateway.txt
COPY pyproject.toml README.md LICENSE ./
COPY streamkv streamkv
COPY engine engine
COPY gateway gateway
# gateway.txt is what it needs of the project's dependencies (a test compares the two).
RUN --mount=from=wheels,target=/wheels pip install --find-links /wheels "setuptools>=77" && \
    pip install --no-deps --no-build-isolation . && rm -rf /opt/streamkv/lib/python3*/site-packages/engine

FROM ${PYTHON}
LABEL org.opencontainers.image.title="StreamKV gateway" org.opencontainers.image.licenses=Apache-2.0
COPY docker/passwd docker/group /etc/
COPY --from=build /opt/streamkv /opt/streamkv
COPY --chown=10001:10001 --chmod=0700 docker/empty /run/streamkv
COPY --chown=10001:10001 --chmod=0700 docker/empty /cache
ENV PATH=/opt/streamkv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 \
    STREAMKV_CACHE=/cache HF_HOME=/cache/huggingface STREAMKV_ENDPOINT=ipc:///run/streamkv/engine.sock STREAMKV_HOST=0.0.0.0
USER 10001:10001
VOLUME ["/cache", "/run/streamkv"]
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["streamkv", "gateway"]
HEALTHCHECK --start-period=2h --start-interval=5s --interval=15s --timeout=10s --retries=20 \
    CMD ["streamkv", "health"]
