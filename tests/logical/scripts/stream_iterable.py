import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class EventStream(IterableDataset):
    """A stream of events of unknown length, through a shuffle buffer."""

    def __init__(self, seed, n, buffer_size=16):
        self.seed, self.n, self.buffer_size = seed, n, buffer_size

    def read(self):
        source = random.Random(self.seed)
        for _ in range(self.n):
            x = [source.gauss(0, 1) for _ in range(5)]
            yield torch.tensor(x), torch.tensor(x[0] * x[1] - x[2] + 0.1 * source.gauss(0, 1))

    def __iter__(self):
        buffer, order = [], random.Random(self.seed + 1)
        for item in self.read():
            buffer.append(item)
            if len(buffer) >= self.buffer_size:
                yield buffer.pop(order.randrange(len(buffer)))
        order.shuffle(buffer)
        yield from buffer


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
    step, running = 0, 0.0
    for epoch in range(3):
        for x, y in DataLoader(EventStream(epoch, 230), batch_size=32):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            running = loss.item() if step == 0 else 0.9 * running + 0.1 * loss.item()
            step += 1
            if step % 5 == 0:
                print(f"step {step} batch of {len(x)} running loss {running:.12f}")
    with torch.inference_mode():
        errors = [(model(x) - y).abs() for x, y in DataLoader(EventStream(100, 75), batch_size=32)]
        print("held-out MAE", torch.cat(errors).mean().item(), "worst", torch.cat(errors).max().item())
    torch.save(model.state_dict(), "stream.pt")


if __name__ == "__main__":
    main()
