"""A message-passing network on batches of random graphs: index_add_ over edges, scatter_add_ over graphs."""

import torch
import torch.nn.functional as F
from torch import nn


def random_graph(generator):
    """Return node features, edges and a label: how many nodes have an above-average degree."""
    count = int(torch.randint(4, 10, (1,), generator=generator))
    adjacency = (torch.rand(count, count, generator=generator) < 0.4).triu(1)
    edges = (adjacency | adjacency.T).nonzero().T
    degree = adjacency.sum(0) + adjacency.sum(1)
    return torch.randn(count, 6, generator=generator), edges, (degree.float() > degree.float().mean()).sum()


def collate(graphs):
    """Return one big graph, as PyTorch Geometric does: nodes, edges, the graph of each node, labels."""
    nodes = torch.cat([features for features, _, _ in graphs])
    counts = torch.tensor([len(features) for features, _, _ in graphs])
    starts = counts.cumsum(0) - counts
    edges = torch.cat([edges + start for (_, edges, _), start in zip(graphs, starts, strict=True)], dim=1)
    owner = torch.repeat_interleave(torch.arange(len(graphs)), counts)
    return nodes, edges, owner, torch.stack([label for _, _, label in graphs])


class Convolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, nodes, edges):
        source, destination = edges
        messages = self.neighbours(nodes)[source]
        total = torch.zeros(nodes.shape[0], messages.shape[1]).index_add_(0, destination, messages)
        degree = torch.zeros(nodes.shape[0]).index_add_(0, destination, torch.ones(destination.shape[0]))
        return self.own(nodes) + total / degree.clamp(min=1).unsqueeze(1)


class GraphNetwork(nn.Module):
    def __init__(self, hidden=32, classes=8):
        super().__init__()
        self.first, self.second = Convolution(6, hidden), Convolution(hidden, hidden)
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(2 * hidden, classes)

    def forward(self, nodes, edges, owner, graphs):
        hidden = F.relu(self.norm(self.first(nodes, edges)))
        hidden = F.dropout(F.relu(self.second(hidden, edges)), 0.1, self.training)
        place = owner.unsqueeze(1).expand_as(hidden)
        total = torch.zeros(graphs, hidden.shape[1]).scatter_add_(0, place, hidden)
        most = torch.zeros(graphs, hidden.shape[1]).scatter_reduce_(0, place, hidden, "amax", include_self=False)
        return self.head(torch.cat([total, most], dim=1))


torch.manual_seed(0)
generator = torch.Generator().manual_seed(7)
graphs = [random_graph(generator) for _ in range(42)]
loader = torch.utils.data.DataLoader(graphs, batch_size=12, shuffle=True, collate_fn=collate)
model = GraphNetwork()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)


def train(nodes, edges, owner, labels):
    logits = model(nodes, edges, owner, labels.shape[0])
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss, "correct": (logits.argmax(dim=1) == labels).sum()}


for epoch in range(2):
    total, correct = 0.0, 0
    for nodes, edges, owner, labels in loader:
        result = train(nodes, edges, owner, labels)
        total += result["loss"].item() * len(labels)
        correct += result["correct"].item()
    print(f"epoch {epoch + 1}: loss {total / len(graphs):.4f}, {correct} of {len(graphs)} correct")
