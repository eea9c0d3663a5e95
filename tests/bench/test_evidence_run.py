"""`bench evidence` from the command line: small, and refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from dynamo_semkv.bench import evidence_page, evidence_run


def test_one_small_run_ours_and_dynamos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    small = [
        "--tokens",
        "512",
        "--size",
        "2",
        "--background",
        "10",
        "--negatives",
        "4",
        "--donors",
        "20",
        "--cost-tokens",
        "512",
    ]
    others = ["--peers", "fingerprint", "dynamo", "--peer-tokens", "512", "--peer-size", "2", "--pairs", "0"]
    assert evidence_run.main([*small, *others, "--json", str(figures)]) == 0
    said = json.loads(figures.read_text())
    assert [report["tokens"] for report in said["reports"]] == [512]
    (side,) = said["side_by_side"]
    assert [standing["method"] for standing in side["standings"]] == ["fingerprint", "dynamo"]
    assert [cost["donors"] for cost in said["cost"]] == [20]
    assert "other instruction" in capsys.readouterr().out
    document = tmp_path / "page.md"
    document.write_text(f"Before.\n{evidence_page.BEGIN}\nold\n{evidence_page.END}\nAfter.\n")
    assert evidence_page.main([str(figures), str(document)]) == 0
    written = document.read_text()
    assert written.startswith("Before.\n")
    assert written.endswith("\nAfter.\n")
    assert "old" not in written
    assert all(part in written for part in ("| other instruction |", "negatives accepted", "| 20 |"))
    assert evidence_page.page(written, said) == written, "writing it again changes nothing"
    with pytest.raises(ValueError, match="page: it has no"):
        evidence_page.page("nothing to replace", said)


def test_more_text_than_there_is_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        evidence_run, "installed", lambda: iter(["A text of a few words that is too short for a document. " * 3])
    )
    assert evidence_run.main(["--tokens", "2048", "--peers", "--donors"]) == 2
    assert "the sources hold" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["minhash", "model"])
def test_the_remedy_names_the_extra(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Square brackets are markup to rich: unescaped, the extra was swallowed."""
    monkeypatch.setattr(evidence_run, "find_spec", lambda name: None)
    say = Console(stderr=True, highlight=False, width=200).print
    if missing == "minhash":
        assert evidence_run._installed(["minhash"], say) == []
    else:
        assert evidence_run._model(Path("unused"), say) is None
    assert "(pip install '.[peers]' in a checkout" in capsys.readouterr().err
