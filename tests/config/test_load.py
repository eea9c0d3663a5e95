"""File and environment -> Config: nothing is guessed, nothing is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_semkv.config.limits import limits_of
from dynamo_semkv.config.load import build, config_hash, load_config, parse_yaml, read_salt_key
from dynamo_semkv.config.schema import Config, Materialization, PlacementMode, plain
from dynamo_semkv.contracts.errors import ContractError, ContractErrors, each

CONFIGS = Path(__file__).parents[2] / "configs"


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    for text in ("", "# only a comment\n", "evidence:\n", "evidence:\n  fingerprint:\n"):
        file = tmp_path / "c.yaml"
        file.write_text(text)
        assert load_config(file, {}).config == Config()


def _mappings(kind: type[msgspec.Struct] = Config, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    for name, limits in limits_of(kind).items():
        if issubclass(limits.kind, msgspec.Struct):
            found += _mappings(limits.kind, (*path, name))
    return found


@pytest.mark.parametrize("path", _mappings(), ids=[".".join(p) or "top" for p in _mappings()])
def test_llm_d_router_1068_misspelt_field_at_each_level_is_an_error_with_its_path(path: tuple[str, ...]) -> None:
    section: type[msgspec.Struct] = Config
    for part in path:
        section = limits_of(section)[part].kind
    real = next(iter(limits_of(section)))
    misspelt = real[:-1] + real[-1] * 2
    tree: dict[str, Any] = {misspelt: 1}
    for part in reversed(path):
        tree = {part: tree}
    with pytest.raises(ContractError) as caught:
        build(tree)
    assert caught.value.field == ".".join((*path, misspelt))
    assert f"{real} (did you mean that?)" in str(caught.value)


def test_a_key_that_resembles_nothing_lists_what_exists() -> None:
    with pytest.raises(ContractError, match="the keys of the file: model, dynamo, bus"):
        build({"zzzzzz": 1})


def test_duplicate_keys_are_refused() -> None:
    with pytest.raises(ContractError, match="config line 3"):
        parse_yaml("evidence:\n  max_matches: 3\n  max_matches: 4\n")


def test_off_is_a_word_and_numbers_may_have_exponents() -> None:
    config = build(
        parse_yaml("placement: {mode: off}\nevidence: {deadline_ms: 1e1}\nbus: {stream_max_bytes: 1_000_000_0}\n")
    )
    assert config.placement.mode is PlacementMode.OFF
    assert config.evidence.deadline_ms == 10.0
    with pytest.raises(ContractError, match=r"hints\.enabled: got 'yes', allowed: true or false"):
        build(parse_yaml("hints: {enabled: yes}"))


@pytest.mark.parametrize("text", ["[1, 2]", "just text", "a: [", "!!python/object/apply:os.getcwd []", "? {a: 1}\n: 2"])
def test_what_is_no_mapping_is_a_contract_error(text: str) -> None:
    with pytest.raises(ContractError):
        build(parse_yaml(text))


def test_environment_overrides_the_file_and_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("evidence: {deadline_ms: 3}\nmodel: {name: from-file}\n")
    loaded = load_config(
        file,
        {
            "SEMKV_EVIDENCE__DEADLINE_MS": "7.5",
            "SEMKV_EVIDENCE__FINGERPRINT__MAX_DONORS": "5",
            "SEMKV_MODEL__NAME": "123",
            "SEMKV_PLACEMENT__MODE": "off",
            "SEMKV_HINTS__ENABLED": "false",
            "SEMKV_SECURITY__SALT_KEY_FILE": "null",
            "SEMKV_CONFIG": "another.yaml",
            "PATH": "/bin",
        },
    )
    config = loaded.config
    assert config.evidence.deadline_ms == 7.5
    assert config.evidence.fingerprint.max_donors == 5
    assert config.model.name == "123"
    assert config.placement.mode is PlacementMode.OFF
    assert not config.hints.enabled
    assert config.security.salt_key_file is None
    assert loaded.source.startswith(str(file))
    assert "SEMKV_MODEL__NAME" in loaded.source
    assert "SEMKV_CONFIG" not in loaded.source


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("SEMKV_EVIDENCE__DEADLIN_MS", "deadline_ms"),
        ("SEMKV_EVIDENSE__DEADLINE_MS", "evidence"),
        ("SEMKV_EVIDENCE_DEADLINE_MS", "SEMKV_EVIDENCE__DEADLINE_MS"),
        ("SEMKV_EVIDENCE__FINGERPRINT", "one field of fingerprint"),
        ("SEMKV_EVIDENCE__DEADLINE_MS__X", "has no fields"),
    ],
)
def test_llm_d_router_1068_misspelt_variable_is_an_error(name: str, says: str) -> None:
    with pytest.raises(ContractError, match=says) as caught:
        load_config(None, {name: "1"})
    assert name in str(caught.value)


def test_dynamo_s_own_variables_fill_what_nothing_else_says(tmp_path: Path) -> None:
    """Dynamo's operator sets them in every pod."""
    env = {"DYN_NAMESPACE": "team-graph", "NATS_SERVER": "nats://10.0.0.9:4222"}
    loaded = load_config(None, env)
    assert (loaded.config.dynamo.namespace, loaded.config.bus.url) == ("team-graph", "nats://10.0.0.9:4222")
    assert "DYN_NAMESPACE" in loaded.source
    ours = load_config(None, {**env, "SEMKV_DYNAMO__NAMESPACE": "ours", "SEMKV_BUS__URL": "nats://1.1.1.1:4222"})
    assert (ours.config.dynamo.namespace, ours.config.bus.url) == ("ours", "nats://1.1.1.1:4222")
    file = tmp_path / "semkv.yaml"
    file.write_text("dynamo: {namespace: in-the-file}\nbus: {replicas: 3}\n")
    mixed = load_config(file, env)
    assert (mixed.config.dynamo.namespace, mixed.config.bus.url) == ("in-the-file", "nats://10.0.0.9:4222")
    assert load_config(None, {"DYN_NAMESPACE": ""}).config.dynamo.namespace == "dynamo"
    with pytest.raises(ContractError, match="DYN_NAMESPACE"):
        load_config(None, {"DYN_NAMESPACE": "no/such"})


def test_environment_values_are_checked() -> None:
    with pytest.raises(ContractError, match=r"^SEMKV_EVIDENCE__DEADLINE_MS \(evidence\.deadline_ms\): got 'abc'"):
        load_config(None, {"SEMKV_EVIDENCE__DEADLINE_MS": "abc"})
    with pytest.raises(ContractError, match=r"^SEMKV_DASHBOARD__HOST \(dashboard\.host\): got '0\.0\.0\.0'"):
        load_config(None, {"SEMKV_DASHBOARD__HOST": "0.0.0.0"})


def test_every_error_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("evidence: {deadline_ms: -1, fingerprint: {max_donor: 3}}\nplacement: {mode: on}\nbus: 7\n")
    with pytest.raises(ContractErrors) as caught:
        load_config(file, {"SEMKV_HINTS__ENABLED": "perhaps", "SEMKV_SCORING_SEED": "1"})
    assert [error.field for error in each(caught.value)] == [
        "SEMKV_SCORING_SEED",
        "evidence.deadline_ms",
        "evidence.fingerprint.max_donor",
        "placement.mode",
        "bus",
        "SEMKV_HINTS__ENABLED (hints.enabled)",
    ]
    assert len(str(caught.value).splitlines()) == 6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1\n", r"^config line 2, column 1: got 'the end of the file', allowed: valid YAML; here: "),
        (
            "evidence:\n  deadline_ms: 5: 6\n",
            r"^config line 2, column 17: got 'deadline_ms: 5: 6', allowed: valid YAML; here: ",
        ),
        ("evidence:\n\tdeadline_ms: 5\n", r"^config line 2, column 1: got 'deadline_ms: 5'"),
        (b"model: {name: \xff}\n", r"^config: got '.*', allowed: valid YAML in UTF-8$"),
    ],
)
def test_bad_yaml_is_told_by_line_and_column(text: str | bytes, says: str) -> None:
    with pytest.raises(ContractError, match=says) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


def test_variables_that_mean_nothing_are_warned_of() -> None:
    loaded = load_config(
        None, {"SEMKV_CONFGI": "x", "SEMKV_DEBUG": "1", "SEMKV_CONFIG": "y", "SEMKV_GRAFANA_DASHBOARDS": "z"}
    )
    assert [warning.split()[0] for warning in loaded.warnings] == ["SEMKV_CONFGI", "SEMKV_DEBUG"]
    assert "did you mean SEMKV_CONFIG?" in loaded.warnings[0]
    assert loaded.config == Config()


def test_hash_is_the_same_on_routers_of_one_graph() -> None:
    """Their pages need two ports, and nothing else may differ."""
    one, two = (load_config(None, {"SEMKV_DASHBOARD__PORT": port}).hash for port in ("9700", "9701"))
    assert one == two
    assert load_config(None, {"SEMKV_DASHBOARD__ENABLED": "false"}).hash != one


def test_hash_follows_values_and_not_how_they_were_written(tmp_path: Path) -> None:
    assert load_config(CONFIGS / "reference.yaml", {}).hash == load_config(None, {}).hash == config_hash(Config())
    assert len(config_hash(Config())) == 16
    seen = {config_hash(Config())}
    for tree in ({"evidence": {"deadline_ms": 4.0}}, {"placement": {"mode": "off"}}, {"model": {"name": "m"}}):
        seen.add(config_hash(build(tree)))
    assert len(seen) == 4


def _comments_and_keys(text: str) -> list[tuple[str, bool]]:
    """(key path, the key or one just above it has a comment)."""
    found, stack, commented = [], [], False
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped:
            commented = False
        elif stripped.startswith("#"):
            commented = True
        else:
            depth = (len(line) - len(line.lstrip())) // 2
            stack = [*stack[:depth], stripped.partition(":")[0]]
            found.append((".".join(stack), commented))
    return found


def test_reference_has_every_field_at_its_default() -> None:
    raw = (CONFIGS / "reference.yaml").read_text()
    assert parse_yaml(raw) == plain(Config())
    keys = [key for key, _ in _comments_and_keys(raw)]
    for path in _mappings():
        if path:
            assert ".".join(path) in keys


def test_reference_explains_each_section() -> None:
    for key, commented in _comments_and_keys((CONFIGS / "reference.yaml").read_text()):
        if key.count(".") == 1 and key.split(".")[0] != "dashboard":
            assert commented, key


@pytest.mark.parametrize(
    ("name", "mode", "materialization", "hints"),
    [
        ("off", PlacementMode.OFF, Materialization.OFF, False),
        ("discovery-only", PlacementMode.SHADOW, Materialization.OFF, False),
        ("exact", PlacementMode.SHADOW, Materialization.EXACT, True),
        ("placement", PlacementMode.ENFORCE, Materialization.EXACT, True),
        ("experimental", PlacementMode.ENFORCE, Materialization.EXPERIMENTAL, True),
    ],
)
def test_presets(name: str, mode: PlacementMode, materialization: Materialization, hints: bool) -> None:
    config = load_config(CONFIGS / f"{name}.yaml", {}).config
    assert (config.placement.mode, config.connector.materialization, config.hints.enabled) == (
        mode,
        materialization,
        hints,
    )


def test_presets_are_all_tested() -> None:
    names = {file.stem for file in CONFIGS.glob("*.yaml")}
    assert {"off", "discovery-only", "exact", "placement", "experimental", "reference"} <= names
    for file in CONFIGS.glob("*.yaml"):
        load_config(file, {})


def test_salt_key_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"secret\n")
    assert read_salt_key(file, b"default") == b"secret"
    assert read_salt_key(None, b"default") == b"default"
    for bad in (b"", b"\n", b"x" * 65):
        file.write_bytes(bad)
        with pytest.raises(ContractError, match=r"security\.salt_key_file") as caught:
            read_salt_key(file, b"default")
        assert "xxx" not in str(caught.value)
