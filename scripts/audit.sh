#!/bin/sh
# Known vulnerabilities of the locked versions, by pip-audit in an environment of its own. Needs the package index and its advisories:
# a package that cannot be asked about is an error (--strict), since an index that has no advisories would otherwise pass as clean.
# Exceptions, each with its reason, are lines of requirements/audit-ignore.txt: `ID  reason`.
set -eu
cd "$(dirname "$0")/.."
venv=.cache/audit
[ -x "$venv/bin/pip-audit" ] || { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check pip-audit; }
ignored=""
for id in $(sed -n 's/^\([A-Z][A-Za-z0-9-]*\) .*/\1/p' requirements/audit-ignore.txt); do
  ignored="$ignored --ignore-vuln $id"
done
# torch and what set-up installs without dependency lists are pinned apart from the lock.
exec "$venv/bin/pip-audit" --strict --progress-spinner off --no-deps --disable-pip $ignored \
  -r requirements/lock.txt -r requirements/no-deps.txt -r requirements/torch.txt "$@"
