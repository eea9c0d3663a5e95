from __future__ import annotations

import pytest

from dynamo_semkv.router.runtime_version import installed, verdict


@pytest.mark.parametrize("version", ["1.6.1", "1.6.2", "1.6.19", "1.6.3.post1", "1.6.1rc2"])
def test_supported_versions_say_nothing(version: str) -> None:
    assert verdict(version) == (True, None)


@pytest.mark.parametrize("version", ["0.9.1", "1.5.1", "1.6", "1.6.0"])
def test_older_ones_are_refused_with_the_remedy(version: str) -> None:
    serves, said = verdict(version)
    assert not serves
    assert version in (said or "")
    assert "1.6.1" in (said or "")


@pytest.mark.parametrize("version", ["1.7.0", "2.0", "1.10.0", None, "from-source"])
def test_newer_and_unknown_ones_serve_and_are_told(version: str | None) -> None:
    serves, said = verdict(version)
    assert serves
    assert "1.6" in (said or "")


def test_what_is_installed_here_is_supported() -> None:
    assert verdict(installed()) == (True, None)
