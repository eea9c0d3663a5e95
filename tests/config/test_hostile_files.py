"""Whatever a file or a variable holds, it is accepted or refused with its place; nothing waits, recurses or builds
without end."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.config import watch
from dynamo_semkv.config.load import MAX_CONFIG_BYTES, MAX_ERRORS, build, load_config
from dynamo_semkv.config.watch import ConfigWatch
from dynamo_semkv.config.yaml_text import MAX_DEPTH, MAX_NODES, MAX_SCALAR, parse_yaml
from dynamo_semkv.contracts.errors import ContractError, each

HOSTILE = {
    "no such date": (
        "\nmodel: {name: !!timestamp 2020-13-45}",
        "config line 2: got '2020-13-45', allowed: a valid timestamp",
    ),
    "no such time zone": ("\nmodel: {name: !!timestamp '2001-12-14t21:59:43.10-99:99'}", "config line 2"),
    "no hex digit": ("\nconnector: {slab_bytes: 0x_}", "connector.slab_bytes: got '0x_', allowed: an integer"),
    "no binary digit": ("\nconnector: {slab_bytes: 0b_}", "connector.slab_bytes: got '0b_'"),
    "too long an integer": (f"\nconnector: {{slab_bytes: {'9' * 5000}}}", f"config line 2: got '9999.* {MAX_SCALAR} "),
    "as long in hex": (
        f"connector: {{slab_bytes: 0x{'f' * 1000}}}",
        "connector.slab_bytes: got <an integer of 4000 bits>",
    ),
    "as long for a number": (f"evidence: {{deadline_ms: 0x{'f' * 1000}}}", "evidence.deadline_ms: got <an integer"),
    "no int": ("\nmodel: {name: !!int x}", "config line 2: got 'x', allowed: a valid int"),
    "an empty int": ("\nmodel: {name: !!int ''}", "config line 2: got '', allowed: a valid int"),
    "no float": ("\nmodel: {name: !!float x}", "config line 2: got 'x', allowed: a valid float"),
    "no bool": ("\nmodel: {name: !!bool x}", "config line 2: got 'x', allowed: a valid bool"),
    "no timestamp": ("\nmodel: {name: !!timestamp x}", "config line 2: got 'x', allowed: a valid timestamp"),
    "half a surrogate pair": ('\nmodel: {name: "\\ud800"}', "config line 2: got '.ud800', allowed: a valid str"),
    "one as key": ('\n"\\ud800": 1', "config line 2"),
    "an open bracket": ("\na: " + "[" * 3000, f"config line 2: got '{MAX_DEPTH + 1} levels'"),
    "nested brackets": ("\na: " + "[" * 3000 + "]" * 3000, f"config line 2: got '{MAX_DEPTH + 1} levels'"),
    "nested keys": ("\n".join(" " * i + "a:" for i in range(900)), f"config line 3[23]: got '{MAX_DEPTH + 1} levels'"),
    "too much of it": (f"a: [{'1,' * (MAX_NODES + 1)}]", f"allowed: at most {MAX_NODES}"),
    "shared without end": (
        "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(9))
        + "model: {name: *j}\n",
        r"model.name: got \[\[\[\[",
    ),
    "itself": ("model: {name: &a [*a]}", "config line 1|model.name|config"),
}


@pytest.mark.parametrize(("text", "expected"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ContractError) as caught:
        load_config(file, {})
    told = "\n".join(str(error) for error in each(caught.value))
    assert re.search(expected, told), told
    assert len(told) < 20_000
    told.encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SEMKV_CONNECTOR__SLAB_BYTES", "9" * 5000),
        ("SEMKV_CONNECTOR__SLAB_BYTES", "0x_"),
        ("SEMKV_CONNECTOR__SLAB_BYTES", "2020-13-45"),
        ("SEMKV_EVIDENCE__DEADLINE_MS", "[" * 3000),
        ("SEMKV_EVIDENCE__DEADLINE_MS", "!!float x"),
        ("SEMKV_MODEL__NAME", "\udcff"),
    ],
)
def test_a_hostile_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ContractError, match=f"^{name} "):
        load_config(None, {name: value})


def test_of_many_errors_the_first_are_told_and_the_rest_counted() -> None:
    with pytest.raises(ContractError) as caught:
        build({f"x{n}": 1 for n in range(50_000)})
    told = [str(error) for error in each(caught.value)]
    assert len(told) == MAX_ERRORS + 1
    assert told[0].startswith("x0: got 1")
    assert told[-1] == "config: got '50000 errors', allowed: none; the first 20 are listed"


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "pipe" if kind == "pipe" else Path("/dev/zero")
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ContractError, match=r"^config: got .*a regular file"):
        load_config(path, {})


def test_a_file_that_is_too_long_is_not_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(ContractError, match=f"^config.bytes: got {2**40}, allowed: at most {MAX_CONFIG_BYTES}"):
        load_config(file, {})


@pytest.mark.parametrize("text", [text for text, _ in HOSTILE.values()], ids=HOSTILE)
def test_a_running_router_keeps_its_last_good_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("placement: {mode: shadow}\n")
    watched = ConfigWatch(load_config(file, {}), {})
    before = watched.status()["hash"]
    file.write_text(text)
    news = watched.poll(force=True)
    assert news is not None
    assert news.error is not None
    assert (watched.status()["hash"], watched.status()["last_reload_error"]) == (before, news.error)
    file.write_text("placement: {mode: enforce}\n")
    news = watched.poll(force=True)
    assert news is not None
    assert (news.changed, news.error) == (("placement.mode",), None)


def test_a_file_that_turns_into_a_pipe_does_not_hold_up_the_router(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("placement: {mode: shadow}\n")
    watched = ConfigWatch(load_config(file, {}), {})
    file.unlink()
    os.mkfifo(file)
    news = watched.poll(force=True)
    assert news is not None
    assert news.error is not None
    assert "a regular file" in news.error


def test_a_fault_of_ours_in_reading_is_a_refused_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("placement: {mode: shadow}\n")
    watched = ConfigWatch(load_config(file, {}), {})

    def fails(*args: Any) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(watch, "load_config", fails)
    news = watched.poll(force=True)
    assert news is not None
    assert news.error == "config: KeyError: 'bug'"
    assert watched.status()["last_reload_error"] == news.error
    assert "could not be read" in caplog.text


def test_quoted_it_is_text() -> None:
    assert parse_yaml("model: {name: '2020-13-45'}") == {"model": {"name": "2020-13-45"}}
