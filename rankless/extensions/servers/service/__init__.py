"""Servers that hold tables, and the client with which the workers of a run use them. Nothing here imports PyTorch.

A worker makes a `ServerClient` (in `client`), opens tables by name, pulls rows, pushes its slice of a step, commits.
`process` is the server's program, `table_server` its loop, and `transactions` decides when a step reaches the tables.
Workers and servers exchange `messages` over ZeroMQ's sockets. It needs the extra `ps`.
"""
