"""A user's module of settings, for traps that read it."""

import types

scale = 1.0
nested = types.SimpleNamespace(rate=types.SimpleNamespace(value=1.0))


def factor():
    return scale
