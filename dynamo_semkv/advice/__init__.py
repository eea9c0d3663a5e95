"""Advice: whether to act on a score sheet, and the hint that goes with it. Dynamo stays the routing authority.

`gate.py`: the modes (off, shadow, canary, enforce) and the thresholds that a placement must pass. `decision.py`: the
decision and the closed set of its reasons. `hint.py`: the hint that a decision makes.
"""
