"""The worker side: one rank obeys the leader's orders, copies blocks, and reports what it did.

`rank.py` puts it together, `options.py` says from what.
`load_thread.py` and `landing.py`: loads beside and in front of a forward pass.
`load_checks.py`: what must hold before a copy. `layer_hooks.py`: waiting layer by layer. `save_copies.py`: saves.
`disk.py`: the thread of the rank's disk store.
"""
