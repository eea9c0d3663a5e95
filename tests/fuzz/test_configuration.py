"""Files and variables: a configuration, or errors that name what is wrong; nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_semkv.config import forms
from dynamo_semkv.config.load import Loaded, build, load_config, read_salt_key
from dynamo_semkv.config.schema import Config, plain
from dynamo_semkv.config.yaml_text import parse_scalar, parse_yaml
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.dashboard.access import read_token
from tests.fuzz import odd

REFERENCE = (Path(__file__).resolve().parents[2] / "configs" / "reference.yaml").read_bytes()
in_a_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@settings(max_examples=80)
@given(st.binary(max_size=200) | st.text(max_size=200) | odd.damaged(REFERENCE[:1500]))
def test_any_yaml(raw: bytes | str) -> None:
    try:
        found = parse_yaml(raw)
    except ContractError as error:
        odd.is_short(error, 2_000)
        return
    assert isinstance(found, dict)


@given(odd.texts)
def test_any_scalar(text: str) -> None:
    try:
        parse_scalar(text)
    except ContractError as error:
        odd.is_short(error, 2_000)


@given(odd.texts | st.from_regex(r"(nats|ws|http)://[^/]{0,20}(:[0-9]{0,6})?(,.{0,20})?"))
def test_any_text_of_a_form(text: str) -> None:
    for form in (forms.ADDRESS, forms.BROKERS, forms.COLLECTOR, forms.HOST, forms.NETWORKS, forms.PATH, forms.TEXT):
        wrong = form.wrong(text)
        assert wrong is None or isinstance(wrong, str)
        assert wrong is not None or (text.isprintable() and text == text.strip())


@settings(max_examples=80)
@given(odd.changed(plain(Config())) | odd.mappings(*plain(Config())))
def test_any_tree(tree: object) -> None:
    try:
        found = build(tree)  # type: ignore[arg-type]
    except ContractError as error:
        odd.is_short(error, 20_000)
        return
    except (AttributeError, TypeError):
        assert not isinstance(tree, dict)  # a file's top level is a mapping: parse_yaml has said so before
        return
    assert isinstance(found, Config)


@in_a_folder
@given(raw=st.binary(max_size=120) | odd.damaged(REFERENCE[:3000]))
def test_any_file(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "semkv.yaml"
    path.write_bytes(raw)
    try:
        assert isinstance(load_config(path, {}), Loaded)
    except ContractError as error:
        odd.is_short(error, 40_000)


NAMES = (
    "SEMKV_PLACEMENT__MODE",
    "SEMKV_BUS__URL",
    "SEMKV_EVIDENCE__FINGERPRINT__MAX_DONORS",
    "SEMKV_",
    "SEMKV_A__",
    "SEMKV_BUS",
)


@given(st.dictionaries(st.sampled_from(NAMES) | st.text("SEMKV_AB", max_size=12), odd.texts, max_size=4))
def test_any_environment(env: dict[str, str]) -> None:
    try:
        assert isinstance(load_config(None, env), Loaded)
    except ContractError as error:
        odd.is_short(error, 20_000)


@pytest.mark.parametrize("read", [lambda path: read_salt_key(path, b"default"), lambda path: read_token(str(path))])
@in_a_folder
@given(raw=st.binary(max_size=80))
def test_any_secret_is_taken_or_refused_without_being_shown(tmp_path: Path, read, raw: bytes) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "secret"
    path.write_bytes(raw)
    try:
        read(path)
    except ContractError as error:
        odd.keeps(raw.decode(errors="replace").strip(), str(error).replace(str(path), ""))
