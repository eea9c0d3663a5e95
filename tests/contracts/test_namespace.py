"""CacheNamespace: every field decides, unknown equals nothing, absent is a value; salts enter as keyed digests only."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.keys import block_keys, prompt_key
from dynamo_semkv.contracts.namespace import CacheNamespace, first_difference, semblend_tenant_key, tenant_scope
from tests.contracts import golden, strategies

FULL = msgspec.structs.replace(golden.namespaces()["everything"], ptuning="prompt-1", speculative="eagle")
FIELDS = CacheNamespace.__struct_fields__


def changed(name: str) -> CacheNamespace:
    other: Any = {"tokens_per_block": 64, "multimodal": ("22" * 32,)}.get(name, "another")
    return msgspec.structs.replace(FULL, **{name: other})


def test_the_fields_are_those_of_the_rfc() -> None:
    assert FULL.unknown_fields() == ()
    assert len(FIELDS) == 20


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_is_named_when_it_differs(name: str) -> None:
    assert first_difference(FULL, FULL) is None
    assert first_difference(FULL, changed(name)) == name
    assert first_difference(changed(name), FULL) == name


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_changes_every_key(name: str) -> None:
    tokens = golden.tokens(1, 100)
    values = [FULL, changed(name), msgspec.structs.replace(FULL, **{name: None})]
    if name != "tokens_per_block":
        values.append(msgspec.structs.replace(FULL, **{name: () if name == "multimodal" else ""}))
    digests = {value.digest() for value in values}
    assert len(digests) == len(values)
    keys = [key for digest in digests for key in (prompt_key(digest, tokens), *block_keys(digest, tokens, 32))]
    assert len(set(keys)) == len(keys) == 4 * len(values)


@pytest.mark.parametrize("name", FIELDS)
def test_unknown_equals_nothing(name: str) -> None:
    unknown = msgspec.structs.replace(FULL, **{name: None})
    assert unknown.unknown_fields() == (name,)
    for left, right in ((unknown, FULL), (FULL, unknown), (unknown, unknown)):
        assert first_difference(left, right) == name


def test_the_first_difference_is_in_order_of_declaration() -> None:
    other = msgspec.structs.replace(FULL, engine="x", connector="y")
    assert first_difference(FULL, other) == "engine"


@given(strategies.namespaces, strategies.namespaces)
def test_digests_are_equal_exactly_when_the_values_are(left: CacheNamespace, right: CacheNamespace) -> None:
    assert (left.digest() == right.digest()) == (left == right)


@given(st.lists(strategies.text, max_size=3), st.lists(strategies.text, max_size=3))
def test_lists_of_media_do_not_run_into_each_other(left: list[str], right: list[str]) -> None:
    spaces = [FULL.for_request(tenant="", multimodal=hashes) for hashes in (left, right)]
    assert (spaces[0].digest() == spaces[1].digest()) == (left == right)


def test_for_request_says_what_a_request_brings() -> None:
    plain = golden.BASE.for_request(tenant="")
    assert (plain.tenant, plain.lora, plain.lora_revision, plain.multimodal) == ("", "", "", ())
    assert plain.unknown_fields() == ()
    unhashed = golden.BASE.for_request(tenant="", multimodal=None, lora="a", lora_revision=None)
    assert unhashed.unknown_fields() == ("lora_revision", "multimodal")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": "m" * 513}, "namespace.model"),
        ({"tokens_per_block": 0}, "namespace.tokens_per_block"),
        ({"tokens_per_block": 65_537}, "namespace.tokens_per_block"),
        ({"multimodal": ("x",) * 257}, "namespace.multimodal"),
    ],
)
def test_limits(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ContractError) as caught:
        CacheNamespace(**fields)
    assert caught.value.field == named


any_text = st.text(st.characters(), min_size=1)


@example("\ud800", "\ud801")
@given(any_text, any_text)
def test_tenants_are_told_apart(left: str, right: str) -> None:
    """Any string a salt may be, lone surrogates included."""
    for key in (golden.SALT_KEY, b"k"):
        assert (tenant_scope(left, key) == tenant_scope(right, key)) == (left == right)


@example("\ud800")
@given(any_text)
def test_any_text_has_a_digest(text: str) -> None:
    assert len(CacheNamespace(model=text, multimodal=(text,)).digest()) == 32
    if text == text.strip():
        assert semblend_tenant_key(text).startswith("semblend:tenant:v1:")


def test_the_key_decides_the_scope() -> None:
    assert tenant_scope("a", b"key-1") != tenant_scope("a", b"key-2") != tenant_scope("a")
    assert tenant_scope(None, b"key-1") == tenant_scope(None) == ""


@pytest.mark.parametrize("function", [tenant_scope, semblend_tenant_key])
def test_an_empty_salt_is_refused(function: Any) -> None:
    with pytest.raises(ContractError, match="cache_salt"):
        function("")


@pytest.mark.parametrize("key", [b"", b"x" * 65])
def test_the_key_has_a_size_and_is_not_shown(key: bytes) -> None:
    with pytest.raises(ContractError, match="salt_key: got '<redacted>', allowed: 1 to 64 bytes"):
        tenant_scope("salt", key)


@pytest.mark.parametrize("salt", [" secret", "secret ", "\tsecret"])
def test_salts_that_semblend_would_merge_are_refused_and_not_shown(salt: str) -> None:
    with pytest.raises(ContractError) as caught:
        semblend_tenant_key(salt)
    assert "secret" not in str(caught.value)
