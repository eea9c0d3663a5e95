#!/usr/bin/env bash
# Frontend, our router and TensorRT-LLM workers on one machine, in the shape of Dynamo's own examples/backends/trtllm/launch.
#   MODEL_PATH   model directory or name            Qwen/Qwen3-0.6B
#   WORKERS      worker processes, one GPU each      1
#   ENGINE_ARGS  --extra-engine-args of the workers  graphs/kubernetes/aggregated/engine.yaml
#   WORKER       the worker's command line            python3 -m dynamo.trtllm ... (below)
#   SEMKV_CONFIG, NATS_SERVER, DYN_HTTP_PORT, and what must be installed: common.sh
# Without a GPU: WORKER="python3 -m worker_connector.reference_engine --model tiny" graphs/launch/agg_semkv.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-0.6B}
ENGINE_ARGS=${ENGINE_ARGS:-$here/graphs/kubernetes/aggregated/engine.yaml}
WORKERS=${WORKERS:-1}
WORKER=${WORKER:-"python3 -m dynamo.trtllm --model-path $MODEL_PATH --extra-engine-args $ENGINE_ARGS --publish-kv-events --endpoint-types none"}

start_frontend round-robin
start_router
for ((n = 0; n < WORKERS; n++)); do
  start_worker "$n" "$n" "$WORKER"
done
wait_for_any
