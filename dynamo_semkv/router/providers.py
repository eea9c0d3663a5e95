"""Makes the evidence providers that a configuration asks for, in order of authority: fingerprint, then SemBlend, then
embedding, then those of `plugins.providers`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from dynamo_semkv.config.extras import remedy
from dynamo_semkv.config.schema import Config
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.evidence.encoder import OnnxEncoder, TokenizerFile
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.evidence.provider import EvidenceProvider
from dynamo_semkv.router.plugins import distinct, plugged_providers

T = TypeVar("T")


def providers(config: Config) -> list[EvidenceProvider]:
    """Reads models and tokenizers from disk, so it is called before the first request. ContractError names the field
    whose value cannot be used."""
    evidence = config.evidence
    found: list[EvidenceProvider] = []
    if evidence.fingerprint.enabled:
        found.append(FingerprintProvider(evidence.fingerprint))
    if evidence.semblend.enabled:
        found.append(_made("semblend", lambda: _semblend(config)))
    if evidence.embedding.enabled:
        found.append(_made("embedding", lambda: _embedding(config)))
    return distinct([*found, *plugged_providers(config)])


_EXTRAS = {"embedding": "embeddings", "semblend": "semblend"}


def _made(section: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except ImportError as error:
        raise ContractError(
            f"evidence.{section}.enabled", True, f"false, or {remedy(_EXTRAS[section])} ({error})"
        ) from error
    except ContractError:
        raise
    except Exception as error:  # what a library makes of a file that is no model or tokenizer has no type of its own
        allowed = f"false, or files that can be loaded ({type(error).__name__}: {error})"
        raise ContractError(f"evidence.{section}.enabled", True, allowed) from error


def _tokenizer(config: Config, own: str | None, section: str) -> TokenizerFile:
    if own is not None:
        return TokenizerFile(own, field=f"evidence.{section}.tokenizer_path")
    if config.model.path is None:
        raise ContractError(
            f"evidence.{section}.tokenizer_path", None, "the served model's tokenizer.json, or set model.path"
        )
    return TokenizerFile(config.model.path)


def _embedding(config: Config) -> EvidenceProvider:
    from dynamo_semkv.evidence.embedding import EmbeddingProvider

    section = config.evidence.embedding
    # In this order: onnxruntime 1.32 ends the process with a segmentation fault when usearch 2.26 was imported before
    # it.
    encoder = OnnxEncoder(section.model_path or "")
    import_module("usearch.index")  # missing, it would only be noticed by the first donor
    encoder.encode(["A first text, so that no request pays for the start."], section.window_tokens)
    return EmbeddingProvider(section, encoder, _tokenizer(config, section.tokenizer_path, "embedding"))


def _semblend(config: Config) -> EvidenceProvider:
    from dynamo_semkv.evidence.semblend import SemBlendProvider, minilm

    section = config.evidence.semblend
    return SemBlendProvider(
        section, minilm(section.model_path or ""), _tokenizer(config, section.tokenizer_path, "semblend")
    )
