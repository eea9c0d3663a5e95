"""Providers as a configuration asks for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_semkv.config.evidence import EmbeddingConfig, EvidenceConfig, SemBlendConfig
from dynamo_semkv.config.schema import Config, ModelConfig
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.evidence.provider import Closes
from dynamo_semkv.router.providers import providers
from tests.evidence.tiny_models import write_encoder


def configured(path: Path, *, model: Path | None = None, **sections: object) -> Config:
    embedding = EmbeddingConfig(enabled=True, model_path=str(path), tokenizer_path=None)
    evidence = EvidenceConfig(**{"deadline_ms": 40.0, "embedding": embedding, **sections})  # type: ignore[arg-type]
    return Config(model=ModelConfig(path=str(model) if model is not None else None), evidence=evidence)


def test_only_fingerprints_by_default() -> None:
    assert [provider.name for provider in providers(Config())] == ["fingerprint"]


def test_in_order_of_authority(tmp_path: Path) -> None:
    found = providers(configured(write_encoder(tmp_path), model=tmp_path))
    assert [provider.name for provider in found] == ["fingerprint", "embedding"]
    for provider in found:
        if isinstance(provider, Closes):
            provider.close(5.0)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContractError, match=r"evidence\.embedding\.model_path: got .*model\.onnx"):
        providers(configured(tmp_path, model=tmp_path))
    write_encoder(tmp_path)
    with pytest.raises(ContractError, match=r"evidence\.embedding\.tokenizer_path.*model\.path"):
        providers(configured(tmp_path))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ContractError, match=r"evidence\.embedding\.enabled.*\.\[embeddings\]"):
        providers(configured(tmp_path, model=tmp_path))


def test_semblend_without_its_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    section = SemBlendConfig(enabled=True, model_path=str(tmp_path))
    with pytest.raises(ContractError, match=r"evidence\.semblend\.enabled.*\.\[semblend\]"):
        providers(Config(evidence=EvidenceConfig(semblend=section)))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"embedding": {"enabled": True}}, r"evidence\.embedding\.model_path"),
        ({"semblend": {"enabled": True}}, r"evidence\.semblend\.model_path"),
        (
            {"embedding": {"enabled": True, "model_path": "x"}},
            r"budget_ms.*less than evidence\.deadline_ms, 5 \(40 there",
        ),
    ],
)
def test_a_section_that_cannot_work_is_refused_as_it_is_read(section: dict[str, dict[str, object]], said: str) -> None:
    kinds = {"embedding": EmbeddingConfig, "semblend": SemBlendConfig}
    with pytest.raises(ContractError, match=said):
        EvidenceConfig(**{name: kinds[name](**fields) for name, fields in section.items()})  # type: ignore[arg-type]


def test_both_libraries_load_in_a_process_that_has_neither(tmp_path: Path) -> None:
    """Imported in the other order they end the process, which no test notices that has one of them already."""
    write_encoder(tmp_path)
    file = tmp_path / "c.yaml"
    file.write_text(
        f"model: {{path: {tmp_path}}}\nevidence: {{deadline_ms: 40, embedding: {{enabled: true, model_path: "
        f"{tmp_path}}}}}\n"
    )
    found = subprocess.run(
        [sys.executable, "-m", "dynamo_semkv", "check-config", str(file)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
