"""The live page: placement against materialization. It shows the snapshot and decides nothing."""
