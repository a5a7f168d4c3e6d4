import csv
import os

import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset

CHECKPOINT = "checkpoint.pt"


class EarlyStopping:
    def __init__(self, patience=2, delta=1e-3):
        self.patience, self.delta = patience, delta
        self.counter, self.best, self.stop = 0, None, False

    def __call__(self, val_loss, model):
        if self.best is None or val_loss < self.best - self.delta:
            print(f"validation loss decreased ({self.best} --> {val_loss:.12f}), saving model")
            self.best, self.counter = val_loss, 0
            torch.save(model.state_dict(), "best_model.pt")
        else:
            self.counter += 1
            print(f"EarlyStopping counter: {self.counter} out of {self.patience}")
            self.stop = self.counter >= self.patience


class Trainer:
    def __init__(self):
        torch.manual_seed(2024)
        X, y = load_breast_cancer(return_X_y=True)
        X_train, X_val, y_train, y_val = train_test_split(X, y, test_size=0.3, random_state=0, stratify=y)
        scaler = StandardScaler().fit(X_train)
        to_set = lambda a, b: TensorDataset(torch.Tensor(scaler.transform(a)), torch.Tensor(b))  # noqa: E731
        self.train_loader = DataLoader(to_set(X_train, y_train), batch_size=64, shuffle=True)
        self.val_loader = DataLoader(to_set(X_val, y_val), batch_size=64)
        self.model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.03)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5)
        self.criterion = nn.BCEWithLogitsLoss()
        self.stopper = EarlyStopping()
        self.start_epoch = 0

    def save(self, epoch):
        torch.save(
            {
                "epoch": epoch,
                "model_state_dict": self.model.state_dict(),
                "optimizer_state_dict": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "best": self.stopper.best,
                "rng": torch.get_rng_state(),
            },
            CHECKPOINT,
        )

    def resume(self):
        if not os.path.exists(CHECKPOINT):
            print("no checkpoint, starting from scratch")
            return
        checkpoint = torch.load(CHECKPOINT, weights_only=False)
        self.model.load_state_dict(checkpoint["model_state_dict"])
        self.optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
        self.stopper.best = checkpoint["best"]
        torch.set_rng_state(checkpoint["rng"])
        self.start_epoch = checkpoint["epoch"] + 1
        print(f"resumed from epoch {self.start_epoch}")

    def fit(self, epochs):
        for epoch in range(self.start_epoch, epochs):
            self.model.train()
            train_losses, val_losses = [], []
            for X, y in self.train_loader:
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(X).squeeze(1), y)
                loss.backward()
                self.optimizer.step()
                train_losses.append(loss.item())
            self.model.eval()
            with torch.no_grad():
                for X, y in self.val_loader:
                    val_losses.append(self.criterion(self.model(X).squeeze(1), y).item())
            train_loss, val_loss = sum(train_losses) / len(train_losses), sum(val_losses) / len(val_losses)
            self.scheduler.step(val_loss)
            with open("log.csv", "a", newline="") as f:
                csv.writer(f).writerow([epoch, train_loss, val_loss, self.optimizer.param_groups[0]["lr"]])
            self.stopper(val_loss, self.model)
            self.save(epoch)
            if self.stopper.stop:
                print("Early stopping at epoch", epoch)
                break


if __name__ == "__main__":
    for attempt, epochs in enumerate((2, 12)):  # the second trainer continues where the first one was interrupted
        trainer = Trainer()
        trainer.resume()
        trainer.fit(epochs)
    trainer.model.load_state_dict(torch.load("best_model.pt"))
    print("best", trainer.stopper.best, "weights", sum(p.abs().sum().item() for p in trainer.model.parameters()))
    with open("log.csv") as f:
        print(len(f.readlines()), "epochs logged")
