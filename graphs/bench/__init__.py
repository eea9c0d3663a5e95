"""Runs the report's scenarios on real graphs: `python -m graphs.bench --json FILE`, called by `dynamo_semkv bench
report`.

It is here and not in `dynamo_semkv.bench` because it starts engines: dynamo_semkv knows neither the graphs nor the
engine side.
"""
