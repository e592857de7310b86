"""Crash tests: a consumer process is killed again and again.

At the end each event must be in its database exactly once, in order. ``python -m tests.crash
--help`` is the long run; the tests here are short ones. Nothing in them depends on the speed of
the machine: a process is killed at a step of its work, not after a time.
"""
