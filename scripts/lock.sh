#!/bin/sh
# Write requirements/lock.txt anew: exact versions for Python 3.10 to 3.13 on Linux. Needs uv (`pip install uv`).
# Arguments go to uv: --upgrade for the newest of everything, --upgrade-package NAME for one.
set -eu
cd "$(dirname "$0")/.."
exec uv pip compile pyproject.toml requirements/lock.in \
  --extra router --extra connector --extra local --extra embeddings --extra report --group dev \
  --universal --python-version 3.10 --overrides requirements/overrides.txt \
  --no-emit-index-url --no-header --quiet --output-file requirements/lock.txt "$@"
