"""A user's settings module, which adversarial cases read."""

import types

scale = 1.0
nested = types.SimpleNamespace(rate=types.SimpleNamespace(value=1.0))


def factor():
    return scale
