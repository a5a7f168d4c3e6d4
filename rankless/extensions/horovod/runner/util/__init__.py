"""Threads for tools that start jobs themselves, under the names of Horovod's launcher."""
