import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_diabetes
from sklearn.model_selection import KFold
from torch.utils.data import ConcatDataset, DataLoader, SubsetRandomSampler, TensorDataset


def reset_weights(m):
    """Avoid weight leakage between the folds."""
    for layer in m.children():
        if hasattr(layer, "reset_parameters"):
            print(f"Reset trainable parameters of layer = {layer}")
            layer.reset_parameters()


if __name__ == "__main__":
    k_folds = 3
    num_epochs = 2
    results = {}
    torch.manual_seed(42)
    X, y = load_diabetes(return_X_y=True)
    X = torch.tensor(X * 20, dtype=torch.float32)
    y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32).unsqueeze(1)
    dataset = ConcatDataset([TensorDataset(X[:200], y[:200]), TensorDataset(X[200:], y[200:])])
    kfold = KFold(n_splits=k_folds, shuffle=True, random_state=1)
    for fold, (train_ids, test_ids) in enumerate(kfold.split(np.arange(len(dataset)))):
        print(f"FOLD {fold}")
        print("--------------------------------")
        trainloader = DataLoader(dataset, batch_size=50, sampler=SubsetRandomSampler(train_ids))
        testloader = DataLoader(dataset, batch_size=50, sampler=SubsetRandomSampler(test_ids))
        network = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
        network.apply(reset_weights)
        loss_function = nn.SmoothL1Loss()
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
        for epoch in range(num_epochs):
            current_loss = 0.0
            for i, data in enumerate(trainloader, 0):
                inputs, targets = data
                optimizer.zero_grad()
                outputs = network(inputs)
                loss = loss_function(outputs, targets)
                loss.backward()
                optimizer.step()
                current_loss += loss.item()
                if i % 3 == 2:
                    print("Loss after mini-batch %5d: %.12f" % (i + 1, current_loss / 3))
                    current_loss = 0.0
        torch.save(network.state_dict(), f"./model-fold-{fold}.pth")
        se, total = 0.0, 0
        with torch.no_grad():
            for inputs, targets in testloader:
                outputs = network(inputs)
                se += ((outputs - targets) ** 2).sum().item()
                total += targets.size(0)
        results[fold] = se / total
        print("MSE for fold %d: %.12f over %d" % (fold, results[fold], total))
    print(f"K-FOLD CROSS VALIDATION RESULTS FOR {k_folds} FOLDS")
    for key, value in results.items():
        print(f"Fold {key}: {value}")
    print(f"Average: {sum(results.values()) / len(results)}")
