"""One YAML file with every toggle, once: `schema.py` says what exists and what is allowed, `load.py` reads it."""
