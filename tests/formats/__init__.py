"""What is stored, as each version wrote it: golden files, and what reads them."""
