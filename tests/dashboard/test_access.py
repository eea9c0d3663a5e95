"""Who may read the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_semkv.config.forms import is_loopback
from dynamo_semkv.config.schema import DashboardConfig
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.dashboard.access import Access

TOKEN = "correct-horse-battery-staple"


def with_token(tmp_path: Path, content: str = TOKEN + "\n", host: str = "0.0.0.0") -> Access:
    path = tmp_path / "token"
    path.write_text(content)
    return Access.of(DashboardConfig(host=host, token_file=str(path)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "router.example", ""])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ContractError, match=r"dashboard\.(host|token_file)"):
        Access.of(DashboardConfig(host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_loopback_does_not(host: str) -> None:
    assert Access.of(DashboardConfig(host=host)).token_allowed(None, None)


@pytest.mark.parametrize("host", ["127.0.0.1.evil.example", "localhost.evil.example", "127.1.evil", "1270.0.0.1"])
def test_names_that_only_look_like_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("127.0.0.1:8080", True),
        ("localhost", True),
        ("[::1]:80", True),
        ("evil.example:8080", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
        (None, False),
    ],
)
def test_host_header_without_a_token(header: str | None, allowed: bool) -> None:
    """A foreign name that was made to resolve to 127.0.0.1 gets nothing (DNS rebinding)."""
    assert Access("127.0.0.1").host_allowed(header) is allowed


def test_with_a_token_any_name_may_lead_here(tmp_path: Path) -> None:
    assert with_token(tmp_path).host_allowed("router.example")


def test_the_three_ways_to_show_the_token(tmp_path: Path) -> None:
    access = with_token(tmp_path)
    assert access.token_allowed(f"Bearer {TOKEN}", None)
    assert access.token_allowed(f"bearer {TOKEN}", None)
    assert access.token_allowed(None, access.cookie)
    assert access.token_allowed(None, None, TOKEN)


@pytest.mark.parametrize(
    ("authorization", "cookie", "query"),
    [
        (None, None, None),
        ("Bearer wrong", None, None),
        (f"Basic {TOKEN}", None, None),
        (TOKEN, None, None),
        ("Bearer ", None, None),
        (None, TOKEN, None),
        (None, "", ""),
        (None, None, TOKEN + "x"),
        ("Bearer naïve-token-with-ümlauts", "ü", "ü"),
    ],
)
def test_anything_else_is_refused(
    tmp_path: Path, authorization: str | None, cookie: str | None, query: str | None
) -> None:
    assert not with_token(tmp_path).token_allowed(authorization, cookie, query)


@pytest.mark.parametrize(
    "content", ["", "   \n", "short", "has blanks in the middle of it", "x" * 2_000, "tab\tinside-the-token"]
)
def test_a_bad_token_file_is_refused_without_showing_it(tmp_path: Path, content: str) -> None:
    with pytest.raises(ContractError, match=r"dashboard\.token_file") as caught:
        with_token(tmp_path, content)
    assert not content.strip() or content.strip() not in str(caught.value)


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"dashboard\.token_file.*absent.*FileNotFoundError"):
        Access.of(DashboardConfig(token_file=str(tmp_path / "absent")))


def test_the_token_is_in_no_representation(tmp_path: Path) -> None:
    access = with_token(tmp_path)
    assert TOKEN not in repr(access)
    assert TOKEN not in access.cookie


@pytest.mark.parametrize("junk", [chr(0xDCFF), chr(0xD800), f"a{chr(0xDCFF)}" * 40])
def test_bytes_that_are_no_text_are_a_wrong_token(tmp_path: Path, junk: str) -> None:
    access = with_token(tmp_path)
    assert not access.token_allowed(f"Bearer {junk}", None)
    assert not access.token_allowed(None, junk)
    assert not access.token_allowed(None, None, junk)
