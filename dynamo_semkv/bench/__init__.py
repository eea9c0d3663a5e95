"""Workloads built from real text, and what measures with them.

Text: `texts.py`, `corpus.py`, `alike.py`, `paraphrase.py`, `labelled.py` (prompts whose every token's origin is known).
Requests: `client.py`, `scenarios.py`, `table.py` (the demo's table). `bench evidence`: `evidence_run.py`,
`evidence_arguments.py`, `evidence.py` (is the right donor found?), `evidence_cost.py`, `evidence_page.py`,
`side_by_side.py` and `peers.py` (other methods), `encoder_onnx.py` (the sentence encoder's file). `report/`: `bench
report`. `router/`: `bench router`. `replay/`: policies on a trace.
"""
