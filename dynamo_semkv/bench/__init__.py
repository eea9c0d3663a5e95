"""Workloads built from real text, and what measures with them."""
