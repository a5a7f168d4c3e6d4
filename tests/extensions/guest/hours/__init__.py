import torch

from rankless.ownership.modules_with_states_elsewhere import ExtensionModule


class Face(ExtensionModule):
    """Looks the angle of an hour up, as rows of two numbers. The angles are no tensors of the module."""

    rankless_participant = "hours.participant"

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, hours):
        return torch.ops.hours.angles(self.weight.detach(), hours, 0) + self.weight

    def list_rows(self):
        return {"count": torch.tensor(12)}
