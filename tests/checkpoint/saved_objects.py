"""Objects to save, and short functions to save and load them."""

import torch

from rankless.checkpoint import SaveOptions, Saver, load
from rankless.parallel.mesh import Mesh

SOLO = Mesh.solo()


class Holder:
    """An object with any state."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Number:
    """A number that checks whether all of its state was loaded."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "tensors": [torch.full((50,), float(self.value)) for _ in range(4)]}

    def load_state_dict(self, state):
        for tensor in state["tensors"]:
            assert torch.equal(tensor, torch.full((50,), float(state["value"])))
        self.value = state["value"]


def save(path, objects, *, mesh=SOLO, **options):
    """Save with a new saver, and return when the save is done."""
    saver = Saver(mesh=mesh)
    saver.save(path, objects, options=SaveOptions(**options))
    saver.wait()


def loaded_number(path, mesh=SOLO):
    """Return the number that was saved as `number`."""
    number = Number()
    load(path, {"number": number}, mesh=mesh)
    return number.value
