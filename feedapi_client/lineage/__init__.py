"""Which partitions there are, how they descend from each other, and what to do next. No I/O."""
