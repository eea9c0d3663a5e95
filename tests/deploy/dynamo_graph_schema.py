"""What Dynamo 1.6's operator accepts of a DynamoGraphDeployment, v1beta1: field names, enumerations and bounds.

Read from the API types in ai-dynamo/dynamo, deploy/operator/api/v1beta1 (`dynamographdeployment_types.go` and
`dynamocomponentdeployment_types.go`): facts of the interface. Pod templates are checked against Kubernetes' own schema.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema

KUBERNETES = "v1.34.0"
API_VERSION, KIND = "nvidia.com/v1beta1", "DynamoGraphDeployment"
MAIN = "main"
"""The container that the operator merges its own settings into; each component must have it, with an image."""

_NAME = {"type": "string", "minLength": 1, "maxLength": 63, "pattern": "^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$"}
_OPEN = {"type": "object"}


@cache
def kubernetes() -> dict[str, Any]:
    """Definitions of Kubernetes' API, each closed to fields that it does not have."""
    folder = files("kubernetes_validate") / "kubernetes-json-schema"
    text = (folder / f"{KUBERNETES}-local" / "_definitions.json").read_text().replace("_definitions.json#", "#")
    found: dict[str, Any] = json.loads(text)["$defs"]
    for definition in found.values():
        if "properties" in definition:
            definition.setdefault("additionalProperties", False)
    return found


def check(definition: str, document: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    schema = {"$ref": f"#/$defs/{definition}", "$defs": kubernetes()}
    jsonschema.Draft202012Validator(schema).validate(document)


COMPONENT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "podTemplate"],
    "properties": {
        "name": _NAME,
        "type": {"enum": ["frontend", "worker", "prefill", "decode", "planner", "epp"]},
        "runtimeVersionOverride": {
            "type": "string",
            "pattern": r"^(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})$",
        },
        "globalDynamoNamespace": {"type": "boolean"},
        "podTemplate": _OPEN,
        "replicas": {"type": "integer", "minimum": 0},
        "minAvailable": {"type": "integer", "minimum": 1},
        "multinode": _OPEN,
        "roles": {"type": "array"},
        "sharedMemorySize": {"type": "string"},
        "modelRef": _OPEN,
        "scalingAdapter": _OPEN,
        "eppConfig": _OPEN,
        "frontendSidecar": {"type": "string"},
        "dynamoSidecar": {"type": "string"},
        "compilationCache": _OPEN,
        "topologyConstraint": _OPEN,
        "experimental": _OPEN,
        "providerOverride": _OPEN,
    },
}
GRAPH = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": API_VERSION},
        "kind": {"const": KIND},
        "metadata": _OPEN,
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "annotations": _OPEN,
                "labels": _OPEN,
                "priorityClassName": {"type": "string"},
                "components": {"type": "array", "maxItems": 25, "items": COMPONENT},
                "env": {"type": "array"},
                "backendFramework": {"enum": ["sglang", "vllm", "trtllm"]},
                "restart": _OPEN,
                "topologyConstraint": _OPEN,
                "experimental": _OPEN,
                "providerOverride": _OPEN,
            },
        },
    },
}


def check_graph(document: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError, or ValueError for what the operator's rules say beyond a schema."""
    jsonschema.Draft202012Validator(GRAPH).validate(document)
    check("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta", document["metadata"])
    components = document["spec"]["components"]
    names = [component["name"].lower() for component in components]
    if len(set(names)) != len(names):
        raise ValueError(f"component names must be unique case-insensitively: {names}")
    for component in components:
        check("io.k8s.api.core.v1.PodTemplateSpec", component["podTemplate"])
        main = [c for c in component["podTemplate"]["spec"]["containers"] if c["name"] == MAIN]
        if len(main) != 1 or not main[0].get("image"):
            raise ValueError(f"{component['name']}: no container named main with an image")
        tag = main[0]["image"].rpartition(":")[2]
        parts = tag.split("-")[0].split(".")
        if (
            not (len(parts) == 3 and all(part.isdigit() for part in parts))
            and "runtimeVersionOverride" not in component
        ):
            raise ValueError(
                f"{component['name']}: the image's tag {tag!r} is no version, and runtimeVersionOverride is not set"
            )
