"""What a recording connector was told, by request and by iteration; prompts for the shadow model."""

from __future__ import annotations

from tests.worker_connector.reference_engine.connectors import Recorder
from tests.worker_connector.reference_engine.running import prompt
from worker_connector.engine_api.engine import RequestData
from worker_connector.reference_engine import SHADOW_TINY


def tokens(length: int, seed: int = 0) -> list[int]:
    return prompt(length, seed, SHADOW_TINY.vocab_size)


def data_of(recorder: Recorder, request_id: int) -> list[RequestData]:
    """Every report of one request, in order."""
    reports = [data for output in recorder.outputs for data in output.new_requests + output.cached_requests]
    return [data for data in reports if data.request_id == request_id]


def new_in(recorder: Recorder) -> list[list[int]]:
    """Ids in `new_requests`, by iteration."""
    return [[data.request_id for data in output.new_requests] for output in recorder.outputs]
