"""HTTP. The only package, beside adapters, that imports httpx."""
