"""HTTP: what is sent, what an answer means, and what stays secret. The only importer of httpx."""
