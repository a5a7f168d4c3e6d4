"""The mesh of workers, and the placement of a value on it."""
