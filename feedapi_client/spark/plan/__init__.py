"""What an epoch (a micro-batch) of a streaming query reads, and how that is decided."""
