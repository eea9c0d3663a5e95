"""The written model directories: same tokens and chat text as transformers' own conversion, stable, readable."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from worker_connector.reference_engine import SMOLLM2_NAME, TINY, ModelSource, write_model_directory
from worker_connector.reference_engine.models.gguf_file import smollm2_path

TEXTS = [
    "Hello world, it's 2024!\n\n  def f(x):\n\treturn x**2  # naïve café 你好 😀",
    "  leading   spaces, 1234567 and 12.5e3, don't, I'LL\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    inspect.getsource(inspect),
]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(ModelSource(SMOLLM2_NAME), tmp_path_factory.mktemp("models"))


def test_smollm2_tokenizer_equals_transformers_conversion(smollm2: Path) -> None:
    """On text without digits: the conversion drops the model's own splitting of numbers."""
    theirs = AutoTokenizer.from_pretrained(str(smollm2_path().parent), gguf_file=smollm2_path().name)
    ours = AutoTokenizer.from_pretrained(smollm2)
    plain = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for text in TEXTS:
        text = re.sub(r"\d", "", text)
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours(text).input_ids == plain.encode(text).ids == expected
    assert (ours.eos_token, ours.bos_token) == (theirs.eos_token, theirs.bos_token)
    for messages in (MESSAGES, MESSAGES[1:]):
        rendered = ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_smollm2_splits_numbers_into_digits(smollm2: Path) -> None:
    """Before anything else, so white space in front of a number is not split from other white space."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.encode("\n\n2024.").tokens == ["ĊĊ", "2", "0", "2", "4", "."]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_smollm2_specials_are_hidden_and_whole(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.decode([2, 28120]) == tokenizer.decode([28120])


def test_config_is_readable(smollm2: Path) -> None:
    config = AutoConfig.from_pretrained(smollm2)
    assert (config.num_hidden_layers, config.num_key_value_heads, config.eos_token_id) == (30, 3, 2)
    assert config.tie_word_embeddings is True


def test_tiny_round_trips_any_text(tmp_path: Path) -> None:
    directory = write_model_directory(ModelSource(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert max(ids) < TINY.vocab_size
        assert tokenizer.decode(ids) == text
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False).endswith("user\nHi<|im_end|>\n")
    # What greedy decoding can emit is printable.
    assert tokenizer.decode(list(range(94))).isprintable()


def test_writing_twice_keeps_the_directory(tmp_path: Path) -> None:
    first = write_model_directory(ModelSource(), tmp_path)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert write_model_directory(ModelSource(), tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    other = dataclasses.replace(TINY, num_layers=2)
    assert write_model_directory(ModelSource(config=other), tmp_path) != first
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_vocabulary_below_the_byte_tokenizer_is_refused(tmp_path: Path) -> None:
    small = dataclasses.replace(TINY, vocab_size=100)
    with pytest.raises(ValueError, match="vocab_size is 100"):
        write_model_directory(ModelSource(config=small), tmp_path)
