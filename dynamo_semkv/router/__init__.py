"""The router process: one request from the frontend to the worker and back. Only `runtime.py` and `runtime_egress.py`
import Dynamo.

A request: `ingress.py` (strips hints of clients), `attempts.py`, `facts.py` (what is read of it), `advisor.py`
(everything before dispatch, under deadlines), `pipeline.py` with `sheet_rows.py` (the decision, pure),
`route_records.py` with `opened_event.py` and `sheet_lines.py` (its two records), `observed.py` (counts, logs and
traces), `hint_sender.py` (the hint over the bus), `service.py` (dispatch and stream), `disconnects.py` (clients that
left), `fallback.py` (our faults, counted). What is known: `replicas.py`, `announcements.py`, `shared_ids.py`,
`knowledge.py` (wiring). The process: `process.py`, `providers.py`, `plugins.py`, `reload.py`, `traced.py`. Routes
beside the model: `gateway_advice.py` (advice for a gateway) and `explain_route.py`, both behind `guarded_route.py`.
Dynamo: `runtime.py` (the edge), `runtime_settings.py`, `runtime_dispatch.py`, `runtime_egress.py`, `runtime_cards.py`,
`runtime_errors.py`, `runtime_types.py`, `runtime_version.py`.
"""
