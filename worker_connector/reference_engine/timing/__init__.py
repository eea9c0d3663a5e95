"""A GPU's clock for the reference engine: what a pass and a copy would take there (docs/timed-engine.md).

`profile.py`: what is known of a model on a GPU; the files are in `profiles/`. `cost_model.py`: what work takes on it.
`bus.py`: the time of the link that loads and saves share. `pass_timer.py`: waits for as long as a pass would take.
"""
