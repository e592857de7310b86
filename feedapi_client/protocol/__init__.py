"""The protocol, without I/O: the dialects, negotiation, and bytes to batches."""
