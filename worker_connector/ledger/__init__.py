"""Which blocks the host slab holds, as the leader knows it: the tree of blocks, leases on them, and plans of loads.

`block.py`: entries, and how a chain of them is read at once. `ledger.py`: residence, leases, eviction. `plan.py`: one
load from its offer to its confirmation, as a state machine. Pure: no I/O, no clock, no engine.
"""
