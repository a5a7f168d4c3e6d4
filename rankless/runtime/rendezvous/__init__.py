"""How the ranks of a job find each other: by a launcher's variables, at a TCP address, or through a shared file."""
