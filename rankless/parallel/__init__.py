"""The mesh of workers, the placement of a value on it, and the random generator of a device."""
