"""Scripts for a machine with CUDA, run by hand; pytest collects none of them, and runs their logic on the CPU
(test_gpu_scripts.py).

    python -m tests.gpu.run_all            all of them, in about three minutes: one JSON object and a table
    python -m tests.gpu.poisoned_pages     every byte arrives where it should and nowhere else, in stream order
    python -m tests.gpu.races              a long random schedule of passes, loads and saves that overlap
    python -m tests.gpu.engine_exactness   the connector under the reference engine on the GPU: all ways agree
    python -m tests.gpu.load_times         reports tell how long their loads took, by CUDA events: copies, nothing else
    python -m tests.gpu.slab_copy          bandwidth of slab <-> pages over that of a plain pinned copy
    python -m tests.gpu.overlap            how much of a copy hides behind compute
    python -m tests.gpu.seal_rate          checksums beside copies
    python -m tests.gpu.trtllm_smoke       under TensorRT-LLM, where it is installed: `--model DIR`

They need torch with CUDA; `engine_exactness` and `load_times` also msgspec, nats-py and gguf, and only the last one
tensorrt_llm. The first three leave out each wait between streams in turn, and fail if that goes unnoticed. Exit status:
0 passed, 1 failed, 2 no CUDA here, 3 something else is missing. One JSON object on standard output.
"""
