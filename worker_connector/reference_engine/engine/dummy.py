"""The request with which an attention data-parallel rank pads an empty batch, so that all ranks run a pass together.

It has a page while it runs, and belongs to no submitter: the connector is neither asked nor told about it
(NVIDIA/TensorRT-LLM#19083, #19164).
"""

from __future__ import annotations

from worker_connector.reference_engine.engine.block_manager import BlockManager
from worker_connector.reference_engine.engine.request import LlmRequest, RequestOptions, RequestState
from worker_connector.reference_engine.engine.reuse import ReuseScope
from worker_connector.reference_engine.models.sampling import SamplingParams

_OPTIONS = RequestOptions(max_new_tokens=1, sampling=SamplingParams(seed=0))
#: No submitter's request has this scope, so nothing is shared.
_SCOPE = ReuseScope(multimodal=b"dummy")
DUMMY_ID = -1


def open_dummy(blocks: BlockManager) -> LlmRequest | None:
    """A request that generates behind one token; None if no page can be reserved for it."""
    request = LlmRequest(DUMMY_ID, [0], _OPTIONS, None)
    request.is_dummy_request = True
    request.state = RequestState.GENERATION_IN_PROGRESS
    request.blocks = blocks.open(request.tokens, _SCOPE, len(request.tokens))
    if request.blocks is None:
        return None
    blocks.grow(request.blocks, len(request.tokens))
    return request


def close_dummy(request: LlmRequest, blocks: BlockManager) -> None:
    """Gives its page back; does nothing the second time."""
    if request.blocks is not None:
        blocks.close(request.blocks)
        request.blocks = None
