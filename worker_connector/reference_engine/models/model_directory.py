"""A Hugging Face style model directory for a model of this engine.

Dynamo's frontend tokenizes and applies the chat template from such a directory; this writes one without weights:
config.json, generation_config.json, tokenizer.json and tokenizer_config.json. SmolLM2's tokenizer is rebuilt from its
GGUF metadata. The `tiny` model has a tokenizer whose tokens are the 256 bytes and four specials.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from worker_connector.reference_engine.models.gguf_file import TokenizerData
from worker_connector.reference_engine.models.model_config import TINY, LlamaConfig
from worker_connector.reference_engine.models.presets import SMOLLM2_NAME, ModelSource, smollm2_file

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TINY_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unused|>")


def tiny_tokenizer_data() -> TokenizerData:
    """Byte tokens 0..255 in the order of the byte-level alphabet, then the specials."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + list(_TINY_SPECIALS)
    end_of_text, _, end_of_turn, _ = special_ids = list(range(256, 260))
    return TokenizerData(
        tokens=tokens,
        merges=[],
        special_ids=special_ids,
        bos_id=end_of_text,
        eos_id=end_of_turn,
        unknown_id=end_of_text,
        padding_id=end_of_text,
        chat_template=_CHATML,
    )


def build_tokenizer(data: TokenizerData) -> Tokenizer:
    """Byte-level BPE that splits digits one by one, as SmolLM does."""
    vocabulary = {token: index for index, token in enumerate(data.tokens)}
    merges: list[tuple[str, str]] = []
    for merge in data.merges:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(data.tokens[index], special=True, normalized=False) for index in data.special_ids]
    )
    return tokenizer


def write_model_directory(source: ModelSource, parent: Path) -> Path:
    """Write the directory below `parent` and return it; an existing one of the same content is returned as it is.

    The name ends in a digest of the content, so a directory is never rewritten under a process that reads it, and it is
    put in place by a rename, so a reader never sees half of one.
    """
    if source.name == SMOLLM2_NAME:
        config, data = smollm2_file().config, smollm2_file().tokenizer()
    else:
        config, data = source.config or TINY, tiny_tokenizer_data()
        if config.vocab_size < len(data.tokens):
            raise ValueError(f"vocab_size is {config.vocab_size}; the byte tokenizer needs at least {len(data.tokens)}")
    files = {
        "config.json": _json(_model_config(config, data)),
        "generation_config.json": _json(
            {"bos_token_id": data.bos_id, "eos_token_id": data.eos_id, "pad_token_id": data.padding_id}
        ),
        "tokenizer.json": build_tokenizer(data).to_str(),
        "tokenizer_config.json": _json(_tokenizer_config(config, data)),
    }
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name].encode() + b"\0")
    target = parent / f"{source.name}-{digest.hexdigest()}"
    if target.is_dir():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{source.name}-", dir=parent))
    try:
        for name, text in files.items():
            (staging / name).write_text(text, encoding="utf-8")
        staging.chmod(0o755)
        os.rename(staging, target)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        if not target.is_dir():  # otherwise another process was first, with the same content
            raise
    return target


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _model_config(config: LlamaConfig, data: TokenizerData) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": data.bos_id,
        "eos_token_id": data.eos_id,
        "pad_token_id": data.padding_id,
    }


def _tokenizer_config(config: LlamaConfig, data: TokenizerData) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": data.tokens[data.bos_id],
        "eos_token": data.tokens[data.eos_id],
        "unk_token": data.tokens[data.unknown_id],
        "pad_token": data.tokens[data.padding_id],
        "chat_template": data.chat_template,
    }
