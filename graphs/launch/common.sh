# Sourced by the launch scripts beside it: environment, broker, frontend, router, and the end of everything that was started.
#   SEMKV_CONFIG configuration of router and connector   configs/exact.yaml beside this checkout (shadow: decides and records, touches nothing)
#   NATS_SERVER  a NATS server with JetStream; unset: one is started here
#   DYN_HTTP_PORT  the frontend's port                8000
# The environment that has Dynamo, this package and nats-server must be active (python3 and nats-server are taken from PATH).
# The live page is where the router's line "dashboard: http://..." says; SEMKV_DASHBOARD__PORT=8090 chooses its port.
# Processes on other machines need DYN_DISCOVERY_BACKEND=etcd and the rest of Dynamo's planes; here files do.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

export SEMKV_CONFIG=${SEMKV_CONFIG:-$here/configs/exact.yaml}
export DYN_DISCOVERY_BACKEND=${DYN_DISCOVERY_BACKEND:-file}
discovery=
if [ -z "${DYN_FILE_KV:-}" ]; then
  discovery=$(mktemp -d "${TMPDIR:-/tmp}/dynamo-semkv-discovery-XXXXXX")
  export DYN_FILE_KV=$discovery
fi
export DYN_REQUEST_PLANE=${DYN_REQUEST_PLANE:-tcp} DYN_EVENT_PLANE=${DYN_EVENT_PLANE:-nats}

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

start_frontend() { # router mode
  DYN_SYSTEM_PORT=${FRONTEND_SYSTEM_PORT:-0} python3 -m dynamo.frontend --router-mode "$1" --migration-limit 3 &
  pids+=($!)
}

start_router() { # further variables of its environment
  env DYN_SYSTEM_PORT="${ROUTER_SYSTEM_PORT:-0}" "$@" python3 -m dynamo_semkv serve --config "$SEMKV_CONFIG" &
  pids+=($!)
}

start_worker() { # name, GPU, command line
  # The name under which this worker's reports and donors are known: stable over restarts, different for each worker.
  DYN_STABLE_ROUTING_ID="$(hostname)-$1" DYN_SYSTEM_PORT=0 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$2} bash -c "exec $3" &
  pids+=($!)
}

wait_for_any() {
  # Whichever ends first ends the others: a graph with a part missing only looks like one.
  local status=0
  wait -n || status=$?
  exit "$status"
}
