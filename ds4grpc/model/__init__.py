"""Checkpoints, architectures and their state layouts."""
