"""HTTP: requests, the classification of responses, and redaction of secrets.

The only package, beside adapters, that imports httpx.
"""
