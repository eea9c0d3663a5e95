"""The RFC's benchmark scenarios, measured against what a user would run instead, as one page: `dynamo_semkv bench
report`.

    workload   what is sent, when (arrivals), from which text (library)
    quality    answers against those of the cold run
    figures    records of single requests -> medians with their spread, ratios paired within a run
    sections   runs the parts as programs of their own; scaling and limits are measured here
    goals      every goal of the project, its figure, and whether it is met
    document   the page: tables, plots

The graphs are started by `graphs.bench`: this package must not import graphs, nor the engine side.
"""
