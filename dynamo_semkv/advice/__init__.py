"""Advice: whether to act on a score sheet, and the hint that goes with it. Dynamo stays the routing authority."""
