"""Scoring: filters, scorers in [0, 1], and one sum in one unit, tokens of prefill saved. Pure; weights come from the
configuration."""
