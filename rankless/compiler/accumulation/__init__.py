"""For gradient accumulation: what splitting the batch does to each value, and what a loss divides by."""
