"""The bytes of blocks in host memory, and how they get there and back.

`slab.py`: one rank's rows (which row is given up is decided in `ledger/`). `pinned.py`: the memory under them.
`checksum.py`: what proves that a row still holds what was put into it; `slab_scrubber.py`: the thread that checks.
`transfer.py` copies between pages and rows, on `copy_stream.py` (CPU) or `cuda_stream.py` with `row_kernel.py`.
"""
