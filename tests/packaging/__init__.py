"""What is released: the public signatures, the wheel, the source distribution, old dependencies."""
