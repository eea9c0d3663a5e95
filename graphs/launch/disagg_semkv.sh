#!/usr/bin/env bash
# Frontend, our router, prefill and decode workers on one machine, in the shape of Dynamo's own disagg_router.sh. The router is in front of the
# prefill workers; Dynamo chooses who decodes.
#   MODEL_PATH           model directory or name              Qwen/Qwen3-0.6B
#   SERVED_MODEL_NAME    what clients call it                 MODEL_PATH
#   PREFILL_WORKERS, DECODE_WORKERS   processes, one GPU each  1, 1
#   PREFILL_ENGINE_ARGS, DECODE_ENGINE_ARGS   --extra-engine-args  graphs/kubernetes/disaggregated/{engine,decode}.yaml
#   PREFILL_WORKER, DECODE_WORKER     their command lines      python3 -m dynamo.trtllm ... (below)
#   SEMKV_CONFIG, NATS_SERVER, DYN_HTTP_PORT, and what must be installed: common.sh
# Without a GPU:
#   engine="python3 -m worker_connector.reference_engine --model tiny"
#   SERVED_MODEL_NAME=tiny PREFILL_WORKER="$engine --disaggregation-mode prefill --served-model-name tiny-prefill" \
#     DECODE_WORKER="$engine --disaggregation-mode decode --connector off" graphs/launch/disagg_semkv.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-0.6B}
SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-$MODEL_PATH}
PREFILL_WORKERS=${PREFILL_WORKERS:-1}
DECODE_WORKERS=${DECODE_WORKERS:-1}
PREFILL_ENGINE_ARGS=${PREFILL_ENGINE_ARGS:-$here/graphs/kubernetes/disaggregated/engine.yaml}
DECODE_ENGINE_ARGS=${DECODE_ENGINE_ARGS:-$here/graphs/kubernetes/disaggregated/decode.yaml}
# Prefill workers have a name that no client uses: under the public one the router is the prefill tier.
PREFILL_WORKER=${PREFILL_WORKER:-"python3 -m dynamo.trtllm --model-path $MODEL_PATH --served-model-name $SERVED_MODEL_NAME-prefill \
  --extra-engine-args $PREFILL_ENGINE_ARGS --disaggregation-mode prefill --publish-kv-events"}
DECODE_WORKER=${DECODE_WORKER:-"python3 -m dynamo.trtllm --model-path $MODEL_PATH --served-model-name $SERVED_MODEL_NAME \
  --extra-engine-args $DECODE_ENGINE_ARGS --disaggregation-mode decode"}

start_frontend kv
start_router SEMKV_DYNAMO__WORKER_COMPONENT=prefill SEMKV_MODEL__NAME="$SERVED_MODEL_NAME"
for ((n = 0; n < PREFILL_WORKERS; n++)); do
  start_worker "prefill-$n" "$n" "$PREFILL_WORKER"
done
for ((n = 0; n < DECODE_WORKERS; n++)); do
  start_worker "decode-$n" "$((PREFILL_WORKERS + n))" "$DECODE_WORKER"
done
wait_for_any
