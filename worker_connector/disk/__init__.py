"""The tier below the slab: blocks as files.

On the leader, `tier.py` decides what goes to disk and comes back, with `index.py` (what is there), `read_queue.py`
(who waits for which chain) and `listeners.py` (who is told). On a rank, `store.py` reads and writes the files of
`block_file.py`, under `store_epoch.py` and `store_lock.py`. `messages.py`: the messages of leader and ranks about it.
`namespace_codec.py` writes a cache namespace into a file.
"""
