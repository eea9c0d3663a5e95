"""`SEMKV_<SECTION>__<FIELD>` variables, and two of Dynamo's, -> values of the configuration tree. A field that was set
so is blamed on its variable.

override(tree, env) -> Overrides(used, origins, unknown, errors)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from dynamo_semkv.config.limits import limits_of
from dynamo_semkv.config.schema import Config
from dynamo_semkv.contracts.errors import ContractError

ENV_PREFIX = "SEMKV_"
OTHER_VARIABLES = frozenset({"SEMKV_CONFIG", "SEMKV_GRAFANA_DASHBOARDS"})
"""Ours too, and of no field."""
DYNAMO_VARIABLES = {"DYN_NAMESPACE": ("dynamo", "namespace"), "NATS_SERVER": ("bus", "url")}
"""What Dynamo's own processes are told so, and its operator sets in every pod: it counts where neither the file nor a
variable of ours says otherwise."""

_SERVICE_LINK = re.compile(
    r".+_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)", re.DOTALL
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*", re.DOTALL)


def is_service_link(name: str, text: str) -> bool:
    """Kubernetes writes such variables into every pod for each Service of the namespace: a Service `semkv-dashboard`
    gives `SEMKV_DASHBOARD_SERVICE_HOST`, `SEMKV_DASHBOARD_PORT=tcp://10.96.0.7:80` and five more. Nobody meant them for
    us."""
    if _SERVICE_LINK.fullmatch(name):
        return True
    # Without an address such a name is a field of ours, or was meant to be one.
    return name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(text) is not None


class Overrides(NamedTuple):
    """What environment variables say about the configuration."""

    used: tuple[str, ...]
    """Names of the variables that set a field, sorted."""
    origins: dict[str, str]
    """Path of a field -> the variable that set it."""
    unknown: tuple[str, ...]
    """`SEMKV_*` names that mean nothing to us, each with what may have been meant."""
    errors: tuple[ContractError, ...]


def override(tree: dict[str, Any], env: Mapping[str, str], scalar: Callable[[str, type, bool], Any]) -> Overrides:
    """Writes `SEMKV_A__B=text` as `a.b` into the tree. `scalar(text, kind, optional)` reads a value as the file
    would."""
    sections = tuple(limits_of(Config))
    used: list[str] = []
    origins: dict[str, str] = {}
    unknown: list[str] = []
    errors: list[ContractError] = []
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name in OTHER_VARIABLES or is_service_link(name, env[name]):
            continue
        parts = name[len(ENV_PREFIX) :].lower().split("__")
        try:
            if len(parts) > 1:
                _write(tree, parts, env[name], name, scalar)
                used.append(name)
                origins[".".join(parts)] = name
            else:
                _refuse_single_underscore(name, parts[0], sections)
                unknown.append(_unknown(name))
        except ContractError as error:
            errors.append(error)
    for name, (section, field) in DYNAMO_VARIABLES.items():
        values = tree.get(section)
        if env.get(name) and (values is None or (isinstance(values, dict) and field not in values)):
            _write(tree, [section, field], env[name], name, scalar)
            used.append(name)
            origins[f"{section}.{field}"] = name
    return Overrides(tuple(used), origins, tuple(unknown), tuple(errors))


def nearest(key: str, allowed: list[str], path: str) -> str:
    """What is allowed in place of a key that is not, the likeliest first."""
    close = difflib.get_close_matches(key.lower(), allowed, n=1, cutoff=0.5)
    keys = f"the keys of {path or 'the file'}: {', '.join(allowed)}"
    return f"{close[0]} (did you mean that?), or another of {keys}" if close else keys


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, sorted(OTHER_VARIABLES), n=1, cutoff=0.8)
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"{name} is set and means nothing here{meant} A field is {ENV_PREFIX}<SECTION>__<FIELD>"


def _refuse_single_underscore(name: str, rest: str, sections: tuple[str, ...]) -> None:
    """`SEMKV_EVIDENCE_DEADLINE_MS` would otherwise be ignored."""
    section = next((s for s in sections if rest.startswith(s + "_")), None)
    if section is not None:
        field = rest[len(section) + 1 :]
        meant = f"{ENV_PREFIX}{section.upper()}__{field.upper()}"
        raise ContractError(name, "a single underscore after the section", f"two: {meant}")


def _write(
    tree: dict[str, Any], parts: list[str], text: str, name: str, scalar: Callable[[str, type, bool], Any]
) -> None:
    section: type[msgspec.Struct] = Config
    at = tree
    for depth, part in enumerate(parts):
        fields = limits_of(section)
        here = ".".join(parts[:depth])
        if part not in fields:
            raise ContractError(f"{name} ({'.'.join(parts)})", text, nearest(part, list(fields), here))
        limits = fields[part]
        last = depth == len(parts) - 1
        if issubclass(limits.kind, msgspec.Struct):
            if last:
                raise ContractError(name, text, f"one field of {part}: {', '.join(limits.kind.__struct_fields__)}")
            if at.get(part) is None:
                at[part] = {}
            at, section = at[part], limits.kind
            if not isinstance(at, dict):
                raise ContractError(".".join(parts[: depth + 1]), at, limits.allowed())
        elif not last:
            raise ContractError(name, text, f"{'.'.join(parts[: depth + 1])} is a value and has no fields")
        else:
            at[part] = scalar(text, limits.kind, limits.optional)


__all__ = ["ENV_PREFIX", "OTHER_VARIABLES", "Overrides", "nearest", "override"]
