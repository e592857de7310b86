"""Staged epochs: objects that are written once and read any number of times."""
