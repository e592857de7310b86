"""Pulling the plug: a real consumer process is killed again and again, and at the end each event must be in its database exactly once, in order.

``python -m tests.crash --help`` is the long run; the tests here are short ones.
"""
