"""Graphs that can be started as they are: `graphs.local`, all on one machine."""
