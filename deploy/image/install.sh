#!/usr/bin/env bash
# install.sh SOURCE: installs this package into the Python of Dynamo's runtime image, whichever of its layouts that is:
#   * a virtual environment that `uv venv` made, without pip in it (uv is on PATH);
#   * a virtual environment over TensorRT-LLM's own packages (--system-site-packages), with pip;
#   * no virtual environment: the system's Python, marked as externally managed (PEP 668).
# No version that is there already is changed: a requirement that does not fit one of them ends the build.
set -euo pipefail

python=$(command -v python3)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "${1:?the folder with pyproject.toml}" "$work/source"  # a build may write beside the sources, which may belong to another user

"$python" - > "$work/there.txt" <<'END'
import re
from importlib.metadata import distributions

found = {(each.metadata["Name"] or "").lower(): each.version for each in distributions()}
for name, version in sorted(found.items()):
    if name != "dynamo-semkv" and re.fullmatch(r"[\w.-]+", name) and re.match(r"\d", version or ""):
        print(f"{name}=={version}")
END

export PIP_BREAK_SYSTEM_PACKAGES=1 UV_BREAK_SYSTEM_PACKAGES=1
wanted="$work/source[router,connector]"
if "$python" -m pip --version > /dev/null 2>&1; then
  "$python" -m pip install --no-cache-dir --constraint "$work/there.txt" "$wanted"
elif command -v uv > /dev/null; then
  uv pip install --no-cache --python "$python" --constraint "$work/there.txt" "$wanted"
else
  echo "install.sh: neither pip for $python nor uv is there" >&2
  exit 1
fi
cd / && "$python" -m dynamo_semkv --version
