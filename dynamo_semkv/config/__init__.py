"""One YAML file with every toggle, once: `schema.py` says what exists and what is allowed, `load.py` reads it.

`section.py` and `limits.py`: what a section and a range are. `evidence.py` and `fetch.py`: the sections `evidence` and
`connector.fetch`. `forms.py`: what is a host, a path, a broker's URL. `yaml_text.py`: YAML, bounded.
`environment.py`: `SEMKV_*` variables.
`files.py`, `host_memory.py` and `sizes.py`: whether files are there, memory suffices and numbers fit together.
`watch.py`: what may change while a router runs. `extras.py`: how a missing extra is had. `json_schema.py`: the schema
for editors.
"""
