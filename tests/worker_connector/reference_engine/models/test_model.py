"""The forward pass: against transformers, over chunk boundaries, pages and batches."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from tests.worker_connector.reference_engine.running import prompt
from worker_connector.reference_engine import SMOLLM2_NAME, TINY, ModelSource
from worker_connector.reference_engine.models.kv_pool import KvPool
from worker_connector.reference_engine.models.model import LlamaModel, RowGroup, Segment
from worker_connector.reference_engine.models.model_directory import build_tokenizer, write_model_directory
from worker_connector.reference_engine.models.presets import load_model, smollm2_file

TEXT = (
    "The following are simple statements about countries of Europe and the cities in which their governments sit, "
    "written for children. The capital of Italy is Rome. The capital of France is Paris. The capital of Germany is"
)
HF_NAMES = (
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("blk.", "model.layers."),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_", "self_attn."),
    ("self_attn.q.", "self_attn.q_proj."),
    ("self_attn.k.", "self_attn.k_proj."),
    ("self_attn.v.", "self_attn.v_proj."),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
)

# Both sides compute in float32 from the same dequantised weights; only the order of sums differs. Logits reach 30.
LOGIT_TOLERANCE = 2e-4


@pytest.fixture(autouse=True)
def _one_thread_without_gradients() -> object:
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def one(tokens: list[int], start: int, slots: list[int], wants_logits: bool = True) -> RowGroup:
    return RowGroup((Segment(tokens, start, [slots], wants_logits),))


def last_logits(model: LlamaModel, pool: KvPool, tokens: list[int], slots: list[int], chunk: int) -> torch.Tensor:
    """Prefill `tokens` in chunks and return the logits after the last one."""
    logits = None
    for start in range(0, len(tokens), chunk):
        ((logits,),) = model.forward(pool, [one(tokens[start : start + chunk], start, slots)])
    assert logits is not None
    return logits


def tiny() -> tuple[LlamaModel, KvPool]:
    return load_model(ModelSource()).model, KvPool(TINY, 32, 8, poison=True)


def hf_name(gguf_name: str) -> str:
    for theirs, ours in HF_NAMES:
        gguf_name = gguf_name.replace(theirs, ours)
    return gguf_name


def transformers_model(directory: Path) -> LlamaForCausalLM:
    """transformers' Llama on the dequantised GGUF tensors, put in its row order by its own code."""
    config = AutoConfig.from_pretrained(directory)
    with no_init_weights():
        model = LlamaForCausalLM(config).eval()
    processor = LlamaTensorProcessor(config=config.to_dict())
    state = {}
    for name, tensor in smollm2_file().tensors.items():
        weights = processor.process(gguf.quants.dequantize(tensor.data, tensor.tensor_type), name).weights
        state[hf_name(name)] = torch.from_numpy(weights.copy())
    loaded = model.load_state_dict(state, strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["lm_head.weight"], [])  # tied to the embedding
    model.tie_weights()
    return model


def test_smollm2_logits_equal_transformers(tmp_path: Path) -> None:
    """Prefill in two chunks, then two decode steps."""
    source = ModelSource(SMOLLM2_NAME)
    reference = transformers_model(write_model_directory(source, tmp_path))
    model = load_model(source).model
    pool, slots = KvPool(model.config, 8, 16, poison=True), [5, 2, 7, 0, 3]
    tokenizer = build_tokenizer(smollm2_file().tokenizer())
    tokens = tokenizer.encode(TEXT).ids
    assert 32 < len(tokens) < 76
    logits = last_logits(model, pool, tokens, slots, chunk=32)
    expected = reference(torch.tensor([tokens])).logits[0, -1]
    assert expected.abs().max() > 10
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGIT_TOLERANCE)
    for _ in range(2):
        tokens.append(int(logits.argmax()))
        ((decoded,),) = model.forward(pool, [one(tokens[-1:], len(tokens) - 1, slots)])
        assert decoded is not None
        logits = decoded
        expected = reference(torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=LOGIT_TOLERANCE)
    assert tokenizer.decode(tokens).endswith("Germany is Berlin.")


@pytest.mark.parametrize("chunk", [1, 8, 24, 61])
def test_chunked_prefill_equals_whole(chunk: int) -> None:
    model, pool = tiny()
    tokens = prompt(61)
    whole = last_logits(model, pool, tokens, list(range(8)), chunk=64)
    chunked = last_logits(model, pool, tokens, list(range(10, 18)), chunk)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-4)
    assert chunked.argmax() == whole.argmax()


def test_prefill_does_not_depend_on_the_batch() -> None:
    """Bit-identical alone and between other prefills and decodes."""
    model, pool = tiny()
    tokens, other = prompt(40), prompt(30, 1)
    alone = last_logits(model, pool, tokens, [0, 1, 2, 3, 4], chunk=64)
    last_logits(model, pool, other, [20, 21, 22, 23], chunk=64)
    decodes = RowGroup(tuple(Segment([token], 30, [[20, 21, 22, 23]]) for token in (5, 6)))
    batched = model.forward(pool, [one(other, 0, [10, 11, 12, 13]), one(tokens, 0, [14, 15, 16, 17, 18]), decodes])
    assert torch.equal(batched[1][0], alone)  # type: ignore[arg-type]


def test_result_depends_on_page_contents_not_on_slots() -> None:
    """Copying the pages elsewhere and going on there is bit-identical: what makes loaded KV equal to computed KV."""
    model, pool = tiny()
    tokens = prompt(60)
    here = list(range(8))
    random.Random(3).shuffle(there := list(range(20, 28)))
    model.forward(pool, [one(tokens[:40], 0, here, wants_logits=False)])
    pool.tensor[there[:5]] = pool.tensor[here[:5]]
    ((warm,),) = model.forward(pool, [one(tokens[40:], 40, here)])
    ((moved,),) = model.forward(pool, [one(tokens[40:], 40, there)])
    assert torch.equal(warm, moved)  # type: ignore[arg-type]


def test_poisoned_pages_show() -> None:
    model, pool = tiny()
    ((logits,),) = model.forward(pool, [one(prompt(8), 8, [0, 1])])  # page 0 was never written
    assert logits is not None
    assert logits.isnan().all()


def test_chunks_without_logits_compute_none() -> None:
    model, pool = tiny()
    assert model.forward(pool, [one(prompt(8), 0, [0], wants_logits=False)]) == [[None]]


def test_layout_describes_the_pool() -> None:
    _, pool = tiny()
    layout = pool.layout()
    view = layout.as_single_pool_tensor()
    assert view is not None
    assert view.shape == (32, TINY.num_layers, 2, 8 * TINY.kv_elements_per_token)
    assert view.data_ptr() == pool.tensor.data_ptr()
    pages = pool.groups[0]
    pages.write(1, pages.token_rows([4], 3, 4), torch.ones(1, 128), 2 * torch.ones(1, 128))
    assert view[4, 1].unique().nan_to_num().tolist()[:2] == [1.0, 2.0]
    assert layout.groups[0].regions[0].slot_tensor(4, torch.float32).nansum() == 3 * 128
