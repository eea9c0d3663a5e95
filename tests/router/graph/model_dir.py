"""A model directory small enough to tokenize with, without weights and without a download.

One token per word ``w0 .. w{n-1}``, so a test that sends ``n`` words knows the prompt's token count, and a completion
shows which token ids came back.
"""

from __future__ import annotations

import json
from pathlib import Path

WORDS = 2000
EOS_TOKEN_ID = WORDS
EOS = "<eos>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"


def prompt(start: int, count: int) -> str:
    """``count`` words from ``w{start}`` on; ``count`` tokens."""
    return " ".join(f"w{i % WORDS}" for i in range(start, start + count))


def write_model_dir(path: Path) -> Path:
    """Write config, tokenizer and chat template of a word-level model into ``path`` and return it."""
    path.mkdir(parents=True, exist_ok=True)
    special = {
        "id": EOS_TOKEN_ID,
        "content": EOS,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {**{f"w{i}": i for i in range(WORDS)}, EOS: EOS_TOKEN_ID},
            "unk_token": EOS,
        },
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": WORDS + 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 65536,
        "bos_token_id": EOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOS,
        "eos_token": EOS,
        "unk_token": EOS,
        "model_max_length": 65536,
        "chat_template": CHAT_TEMPLATE,
    }
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": {"eos_token_id": EOS_TOKEN_ID, "bos_token_id": EOS_TOKEN_ID},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path
