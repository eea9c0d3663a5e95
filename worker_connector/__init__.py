"""Engine side of semantic KV reuse: a TensorRT-LLM KV cache connector and a CPU reference engine to run it on."""
