"""Pipeline parallelism: cut a captured program into stages, and run them on microbatches in a schedule."""
