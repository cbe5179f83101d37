# Shared by the scripts beside it: finds Python, keeps .venv in step with pyproject.toml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${SURESTEP_VENV:-.venv}

find_python() {
  for python in python3.11 python3 python3.12 python3.13 python; do
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
  done
  echo "Python 3.11 or newer is needed" >&2
  exit 1
}

# install EXTRA: once, and again when the dependencies have changed. Torch goes first and pinned: PyPI's
# build for Linux brings gigabytes of CUDA, so PyTorch's CPU index is asked too where it answers.
install() {
  local stamp="$venv/.installed-$1" cpu=https://download.pytorch.org/whl/cpu index=()
  cmp -s <(cat pyproject.toml constraints.txt) "$stamp" && return
  find_python
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  command -v nvidia-smi >/dev/null || ! "$python" -c "import urllib.request as r; r.urlopen('$cpu', timeout=3)" 2>/dev/null ||
    index=(--extra-index-url "$cpu")
  echo "Installing into $venv (a few minutes the first time)" >&2
  "$venv/bin/pip" install -q --disable-pip-version-check "${index[@]}" -c constraints.txt torch
  "$venv/bin/pip" install -q --disable-pip-version-check -c constraints.txt -e ".[$1]"
  cat pyproject.toml constraints.txt >"$stamp"
}
