"""What the router adds to a request: `dynamo_semkv bench router`.

`stages.py`: each stage by itself and all of them together, in this process, against a simulated Dynamo (`scene.py`);
and the decision for growing numbers of replicas. `graph.py` with `drive.py`: requests a second through real processes
(mockers, frontends, a bare Python router, ours), in slices that alternate, and Dynamo's own Rust router beside them.
"""
