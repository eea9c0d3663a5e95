"""Scripts for a machine with CUDA, run by hand; pytest collects none of them.

    python -m tests.gpu.slab_copy        bandwidth of slab <-> pages over that of a plain pinned copy
    python -m tests.gpu.poisoned_pages   every byte arrives where it should and nowhere else, in stream order
    python -m tests.gpu.overlap          how much of a copy hides behind compute

They need torch with CUDA and no tensorrt_llm. Exit status: 0 passed, 1 failed, 2 no CUDA here. One JSON object on standard output.
"""
