"""The rendezvous of a job's ranks: by a launcher's variables, at a TCP address, or through a shared file."""
