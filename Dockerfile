# syntax=docker/dockerfile:1
# Two images from one file, the same for coordinator, workers, Ray and jobs. No model is in them.
#   docker build --target cpu  --tag kvpact:0.1.0 .
#   docker build --target cuda --tag kvpact:0.1.0-cuda .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS python
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

FROM python AS wheel
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY kvpact kvpact
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY coordinator coordinator
# By variable, so that it holds for what builds the wheel as well.
RUN PIP_CONSTRAINT=/src/constraints.txt pip wheel --no-deps --wheel-dir /wheels .

FROM python AS runtime
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN useradd --uid 1000 --user-group --create-home --shell /bin/bash kvpact
# What a driver finds where there is a GPU; without one it is nothing.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    RAY_USAGE_STATS_ENABLED=0
WORKDIR /home/kvpact

# torch with its CUDA libraries, as PyPI has it; the machine brings the driver.
FROM runtime AS cuda
RUN --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --constraint /tmp/constraints.txt /wheels/*.whl
USER 1000:1000
CMD ["kvpact", "--help"]

# torch from PyTorch's public CPU index: a tenth of the size.
FROM runtime AS cpu
RUN --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-deps --constraint /tmp/constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
    && pip install --constraint /tmp/constraints.txt /wheels/*.whl
USER 1000:1000
CMD ["kvpact", "--help"]
