"""The little of kustomize that our folders use: resources, configMapGenerator from files. Anything else is an error
here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_KEYS = {"apiVersion", "kind", "resources", "configMapGenerator", "generatorOptions"}


def build(folder: Path) -> list[dict[str, Any]]:
    """Every document that the folder stands for."""
    text = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert (text["apiVersion"], text["kind"]) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")
    assert text.keys() <= _KEYS, text.keys() - _KEYS
    found: list[dict[str, Any]] = []
    for resource in text.get("resources", []):
        path = (folder / resource).resolve()
        found += build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for generator in text.get("configMapGenerator", []):
        options = {**text.get("generatorOptions", {}), **generator.get("options", {})}
        assert options["disableNameSuffixHash"] is True, "a hashed name is not what the graphs refer to"
        found.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": generator["name"], "labels": options.get("labels", {})},
                "data": {Path(file).name: (folder / file).read_text() for file in generator["files"]},
            }
        )
    return found
