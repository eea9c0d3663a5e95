"""Scoring: filters, scorers in [0, 1], and one sum in one unit, tokens of prefill saved. Pure; weights come from the
configuration.

`choose.py`: replicas and matches to a sheet, and the best row. `replica_view.py`: what is known of one replica.
`filters.py`: who may not be chosen. `donor_value.py` and `credit.py`: what a donor is worth. `scorers.py` explain a
row. `extra.py`: scorers of plugins.
"""
