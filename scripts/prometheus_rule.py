"""Prints deploy/observability's rules as the PrometheusRule of graphs/kubernetes/monitoring. A test compares the
two."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
HEAD = """\
# Made from deploy/observability/prometheus/rules:
#   python scripts/prometheus_rule.py > graphs/kubernetes/monitoring/prometheusrule.yaml
"""


def text() -> str:
    """The whole file as YAML."""
    groups = []
    for path in sorted((ROOT / "deploy/observability/prometheus/rules").glob("*.yml")):
        groups += yaml.safe_load(path.read_text())["groups"]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "semkv"},
        "spec": {"groups": groups},
    }
    return HEAD + yaml.safe_dump(rule, sort_keys=False, width=140)


if __name__ == "__main__":
    print(text(), end="")
