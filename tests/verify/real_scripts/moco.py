"""MoCo: a momentum encoder and a queue of negative keys, both updated in the training step."""

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import rankless


class MoCo(nn.Module):
    def __init__(self, encoder, dim=32, size=128, momentum=0.99, temperature=0.1):
        super().__init__()
        self.size, self.momentum, self.temperature = size, momentum, temperature
        self.encoder_q = encoder
        self.encoder_k = copy.deepcopy(encoder)
        for parameter in self.encoder_k.parameters():
            parameter.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for query, key in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            key.data = key.data * self.momentum + query.data * (1.0 - self.momentum)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        places = (self.queue_ptr + torch.arange(keys.shape[0])) % self.size
        self.queue[:, places] = keys.T
        self.queue_ptr[0] = (self.queue_ptr + keys.shape[0]) % self.size

    def forward(self, images_q, images_k):
        queries = F.normalize(self.encoder_q(images_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            keys = F.normalize(self.encoder_k(images_k), dim=1)
        positive = torch.einsum("nc,nc->n", queries, keys).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", queries, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / self.temperature
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._dequeue_and_enqueue(keys)
        return logits, labels


def augment(images):
    shifts = torch.randint(0, 3, (images.shape[0], 1, 1, 1))
    padded = F.pad(images, (1, 1, 1, 1))
    crops = torch.stack([padded[:, :, shift : shift + 8, shift : shift + 8] for shift in range(3)])
    chosen = sum(crop * (shifts == number) for number, crop in enumerate(crops))
    return chosen + 0.1 * torch.randn_like(chosen)


torch.manual_seed(0)
images = torch.tensor(load_digits().images[:203], dtype=torch.float32)[:, None] / 16
encoder = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 64),
    nn.ReLU(),
    nn.Linear(64, 32),
)
model = MoCo(encoder)
optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
data = torch.utils.data.TensorDataset(images)
loader = rankless.loader(data, batch_size=48, shuffle=True)


@rankless.job(model=model, optimizer=optimizer)
def train(images):
    logits, labels = model(augment(images), augment(images))
    loss = F.cross_entropy(logits, labels)
    return {"loss": loss, "accuracy": (logits.argmax(dim=1) == labels).float().mean()}


for epoch in range(2):
    for (images,) in loader:
        result = train(images)
    print(
        f"epoch {epoch + 1}: loss {result['loss'].item():.4f}, accuracy {result['accuracy'].item():.3f},"
        f" queue {model.queue.sum().item():.4f} at {model.queue_ptr.item()}"
    )
