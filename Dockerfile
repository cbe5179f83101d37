# Images of the services: docker build --target gateway|scheduler|worker .
#
# BASE_IMAGE is any Debian or Ubuntu with Python >= 3.11. For NVIDIA GPUs build the worker with
#   --build-arg BASE_IMAGE=nvidia/cuda:12.8.1-devel-ubuntu24.04 --build-arg TORCH_INDEX= --build-arg WORKER_EXTRAS="worker cuda"
# and run it with --gpus all.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS base
RUN command -v python3 && python3 -c 'import venv, ensurepip' \
 || (apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && apt-get clean && rm -rf /var/lib/apt/lists/*)
RUN useradd --system --uid 10001 --create-home surestep
ENV PATH=/opt/surestep/bin:$PATH PYTHONUNBUFFERED=1

# Dependencies and sources are installed in stages of their own: pip's cache and the tools that it
# needs stay out of the images, and a change of source does not install the dependencies again.
FROM base AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/surestep
WORKDIR /src
COPY pyproject.toml constraints.txt scripts/requirements ./

FROM build AS build-scheduler
RUN ./requirements > requirements.txt && pip install -c constraints.txt -r requirements.txt
COPY . .
RUN pip install --no-deps .

FROM build AS build-gateway
RUN ./requirements gateway > requirements.txt && pip install -c constraints.txt -r requirements.txt
COPY . .
RUN pip install --no-deps .

FROM build AS build-worker
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG WORKER_EXTRAS="worker import-gguf"
RUN pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
RUN ./requirements $WORKER_EXTRAS > requirements.txt && pip install -c constraints.txt -r requirements.txt
COPY . .
RUN pip install --no-deps .

FROM base AS scheduler
COPY --from=build-scheduler /opt/surestep /opt/surestep
USER surestep
ENV SURESTEP_SCHEDULER_LISTEN=0.0.0.0:50051
EXPOSE 50051
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m CMD ["python", "-m", "surestep_common.healthcheck", "127.0.0.1:50051"]
CMD ["python", "-m", "surestep_common.watchdog", "127.0.0.1:50051", "--", "python", "-m", "surestep_scheduler"]

FROM base AS gateway
COPY --from=build-gateway /opt/surestep /opt/surestep
USER surestep
ENV SURESTEP_HOST=0.0.0.0 SURESTEP_PORT=8000
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m CMD ["python", "-m", "surestep_common.healthcheck", "http://127.0.0.1:8000/health/ready"]
CMD ["python", "-m", "surestep_gateway"]

# The C kernels are compiled for the processor they meet, when a rank first starts: hence gcc.
FROM base AS worker
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=build-worker /opt/surestep /opt/surestep
RUN install -d -o surestep -g surestep /models && install -d -m 0700 -o surestep -g surestep /secrets
USER surestep
ENV SURESTEP_WORKER_LISTEN=0.0.0.0:50061 SURESTEP_SUPERVISOR_LISTEN=0.0.0.0:50071
EXPOSE 50061 50071
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m CMD ["python", "-m", "surestep_common.healthcheck", "127.0.0.1:50061"]
CMD ["python", "-m", "surestep_common.watchdog", "127.0.0.1:50071", "--", "python", "-m", "surestep_worker"]
