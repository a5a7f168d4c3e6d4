"""Handwritten digits with Hugging Face Accelerate: accumulation, clipping, evaluation, a checkpoint."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    set_seed(42)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    train_loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=50, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=64)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    for epoch in range(2):
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()

        model.eval()
        hits = rows = 0
        for images, labels in test_loader:
            with torch.no_grad():
                predictions = model(images).argmax(dim=1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            hits += (predictions == labels).sum().item()
            rows += len(labels)
        mean = accelerator.reduce(loss.detach(), reduction="mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item()!r}, {hits} of {rows} right")

    accelerator.save_state("accelerate_state")
    accelerator.wait_for_everyone()
    accelerator.print(f"processes: {accelerator.num_processes}, {accelerator.distributed_type}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
