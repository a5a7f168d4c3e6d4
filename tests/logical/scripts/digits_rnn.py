from __future__ import print_function

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.rnn = nn.LSTM(input_size=8, hidden_size=24, batch_first=True)
        self.batchnorm = nn.BatchNorm1d(24)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout2d(0.5)
        self.fc1 = nn.Linear(24, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, input):
        # Shape of input is (batch_size, 1, 8, 8); it is read row by row
        input = input.reshape(-1, 8, 8)
        output, hidden = self.rnn(input)
        # RNN output shape is (seq_len, batch, input_size): take the last output
        output = output[:, -1, :]
        output = self.batchnorm(output)
        output = self.dropout1(output.unsqueeze(2).unsqueeze(3)).flatten(1)
        output = self.fc1(output)
        output = F.relu(output)
        output = self.dropout2(output.unsqueeze(2).unsqueeze(3)).flatten(1)
        output = self.fc2(output)
        return F.log_softmax(output, dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(
                "Train Epoch: {} [{}/{}]\tLoss: {:.12f}".format(
                    epoch, batch_idx * len(data), len(train_loader.dataset), loss.item()
                )
            )


def test(args, model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    test_loss /= len(test_loader.dataset)
    print("\nTest set: Average loss: {:.12f}, Accuracy: {}/{}\n".format(test_loss, correct, len(test_loader.dataset)))


def main():
    parser = argparse.ArgumentParser(description="PyTorch digits RNN example")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--log-interval", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cpu")
    data = load_digits()
    pairs = [(torch.tensor(i, dtype=torch.float32)[None] / 16, int(t)) for i, t in zip(data.images, data.target)]
    train_loader = torch.utils.data.DataLoader(pairs[:600], batch_size=args.batch_size, shuffle=True)
    test_loader = torch.utils.data.DataLoader(pairs[600:800], batch_size=128)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(args, model, device, test_loader)
        scheduler.step()
    torch.save(model.state_dict(), "digits_rnn.pt")


if __name__ == "__main__":
    main()
