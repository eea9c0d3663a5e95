"""A model directory that a frontend and a mocker can use: one token per word, no weights, no download."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

WORDS = 20_000


def text(ids: Iterable[int]) -> str:
    """Words whose token ids are `ids` (below WORDS), whatever surrounds them: the template adds none."""
    return " ".join(f"w{number}" for number in ids)


def write_model_dir(path: Path, words: int = WORDS, context: int = 131_072) -> Path:
    """Writes the directory and returns it. Token ids 0 to `words` - 1 are words, `words` ends a sequence; prompts have
    up to `context` tokens."""
    path.mkdir(parents=True, exist_ok=True)
    end = {"id": words, "content": "<eos>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    vocabulary = {**{f"w{number}": number for number in range(words)}, "<eos>": words}
    template = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"
    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": words + 1,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "max_position_embeddings": context,
            "bos_token_id": words,
            "eos_token_id": words,
            "torch_dtype": "float32",
        },
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<eos>"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<eos>",
            "eos_token": "<eos>",
            "unk_token": "<eos>",
            "model_max_length": context,
            "chat_template": template,
        },
        "generation_config.json": {"eos_token_id": words, "bos_token_id": words},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path
