"""The models that the reference engine runs, and the KV pool that they write into.

`presets.py`: the models it knows by name. `model_config.py`: a model's shape. `weights.py`: its weights, or random
ones. `gguf_file.py`: a model in a GGUF file. `model_directory.py`: a model directory for Dynamo's frontend.
`layer_groups.py`: layers that share an attention window. `kv_pool.py`: the paged KV memory of one rank. `model.py`: the
forward pass. `sampling.py`: the next token. `shadow_model.py`: a model that computes nothing and knows what every page
must hold. `timed_model.py`: the same for prompts of 100,000 tokens.
"""
