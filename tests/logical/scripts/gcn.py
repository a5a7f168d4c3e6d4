"""Semi-supervised node classification with a graph convolutional network; one full graph, no batches."""

import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(42)
N, CLASSES, FEATURES = 120, 3, 10
labels = torch.arange(N) % CLASSES
features = torch.randn(N, FEATURES) + F.one_hot(labels, FEATURES) * 0.8
same = labels.unsqueeze(0) == labels.unsqueeze(1)
prob = torch.where(same, torch.tensor(0.12), torch.tensor(0.02))
upper = torch.triu((torch.rand(N, N) < prob).float(), diagonal=1)
adj = upper + upper.t() + torch.eye(N)
deg = adj.sum(1).pow(-0.5)
adj = (deg.unsqueeze(1) * adj * deg.unsqueeze(0)).to_sparse()
idx_train, idx_val, idx_test = torch.arange(30), torch.arange(30, 60), torch.arange(60, N)


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        stdv = 1.0 / math.sqrt(self.weight.size(1))
        self.weight.data.uniform_(-stdv, stdv)
        self.bias.data.uniform_(-stdv, stdv)

    def forward(self, input, adj):
        support = torch.mm(input, self.weight)
        return torch.spmm(adj, support) + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super().__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


def accuracy(output, labels):
    preds = output.max(1)[1].type_as(labels)
    return preds.eq(labels).double().sum() / len(labels)


model = GCN(FEATURES, 16, CLASSES, 0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(30):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    acc_train = accuracy(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()
    model.eval()
    output = model(features, adj)
    loss_val = F.nll_loss(output[idx_val], labels[idx_val])
    if epoch % 5 == 0:
        print(
            "Epoch: {:04d}".format(epoch + 1),
            "loss_train: {:.12f}".format(loss_train.item()),
            "acc_train: {:.4f}".format(acc_train.item()),
            "loss_val: {:.12f}".format(loss_val.item()),
        )

model.eval()
output = model(features, adj)
print(
    "Test set results:",
    "loss= {:.12f}".format(F.nll_loss(output[idx_test], labels[idx_test]).item()),
    "accuracy= {:.4f}".format(accuracy(output[idx_test], labels[idx_test]).item()),
)
