"""A GPU's clock for the reference engine: what a pass and a copy would take there, without computing or copying that
much.

`profile` reads what is known of a model on a GPU, `cost_model` says what work takes on it, `bus` hands out the time of
the link that loads and saves share, `pass_timer` waits for as long as a pass would take, and `timed_model` stands in
for the model: it computes nothing and checks what each page holds. `profiles/` has the figures, each with its source.
"""
