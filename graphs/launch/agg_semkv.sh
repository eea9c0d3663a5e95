#!/usr/bin/env bash
# Frontend, our router and TensorRT-LLM workers on one machine, in the shape of Dynamo's own examples/backends/trtllm/launch.
#   MODEL_PATH   model directory or name            Qwen/Qwen3-0.6B
#   WORKERS      worker processes, one GPU each      1
#   SEMKV_CONFIG configuration of router and connector   configs/exact.yaml beside this checkout (shadow: decides and records, touches nothing)
#   ENGINE_ARGS  --extra-engine-args of the workers  graphs/kubernetes/aggregated/engine.yaml
#   NATS_SERVER  a NATS server with JetStream; unset: one is started here
#   DYN_HTTP_PORT  the frontend's port                8000
#   WORKER       the worker's command line            python3 -m dynamo.trtllm ... (below)
# Without a GPU: WORKER="python3 -m worker_connector.reference_engine --model tiny" graphs/launch/agg_semkv.sh
# The environment that has Dynamo, this package and nats-server must be active (python3 and nats-server are taken from PATH).
# The live page is where the router's line "dashboard: http://..." says; SEMKV_DASHBOARD__PORT=8090 chooses its port.
# Processes on other machines need DYN_DISCOVERY_BACKEND=etcd and the rest of Dynamo's planes; here files do.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-0.6B}
export SEMKV_CONFIG=${SEMKV_CONFIG:-$here/configs/exact.yaml}
export DYN_DISCOVERY_BACKEND=${DYN_DISCOVERY_BACKEND:-file}
discovery=
if [ -z "${DYN_FILE_KV:-}" ]; then
  discovery=$(mktemp -d "${TMPDIR:-/tmp}/dynamo-semkv-discovery-XXXXXX")
  export DYN_FILE_KV=$discovery
fi
export DYN_REQUEST_PLANE=${DYN_REQUEST_PLANE:-tcp} DYN_EVENT_PLANE=${DYN_EVENT_PLANE:-nats}
ENGINE_ARGS=${ENGINE_ARGS:-$here/graphs/kubernetes/aggregated/engine.yaml}
WORKERS=${WORKERS:-1}
WORKER=${WORKER:-"python3 -m dynamo.trtllm --model-path $MODEL_PATH --extra-engine-args $ENGINE_ARGS --publish-kv-events --endpoint-types none"}

pids=()
cleanup() {
  trap - EXIT INT TERM
  [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  # Only the folder that was made above: one that was named belongs to somebody else.
  [ -z "$discovery" ] || rm -rf "$discovery"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

python3 -m dynamo_semkv check-config "$SEMKV_CONFIG"

if [ -z "${NATS_SERVER:-}" ]; then
  export NATS_SERVER=nats://127.0.0.1:4222
  nats-server --jetstream --addr 127.0.0.1 --port 4222 --store_dir "${TMPDIR:-/tmp}/dynamo-semkv-nats" &
  pids+=($!)
fi

DYN_SYSTEM_PORT=${FRONTEND_SYSTEM_PORT:-0} python3 -m dynamo.frontend --router-mode round-robin --migration-limit 3 &
pids+=($!)

DYN_SYSTEM_PORT=${ROUTER_SYSTEM_PORT:-0} python3 -m dynamo_semkv serve --config "$SEMKV_CONFIG" &
pids+=($!)

for ((n = 0; n < WORKERS; n++)); do
  # The name under which this worker's reports and donors are known: stable over restarts, different for each worker.
  DYN_STABLE_ROUTING_ID="$(hostname)-$n" DYN_SYSTEM_PORT=0 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$n} bash -c "exec $WORKER" &
  pids+=($!)
done

# Whichever ends first ends the others: a graph with a part missing only looks like one.
status=0
wait -n || status=$?
exit "$status"
