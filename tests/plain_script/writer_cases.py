"""A plain script that writes with libraries: safetensors, TensorBoard and wandb, of values of divided batches too."""

import glob
import os
import sqlite3

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

torch.manual_seed(0)
(batch,) = next(iter(DataLoader(TensorDataset(torch.arange(14.0).reshape(7, 2)), batch_size=7)))

save_file({"batch": batch * 1.0}, "batch.safetensors")
print(load_file("batch.safetensors")["batch"].sum().item())
torch.save({"batch": batch, "mean": batch.mean()}, "batch.pt")
print(torch.load("batch.pt")["batch"].sum().item())
np.save("batch.npy", batch.numpy())
try:
    save_file({"batch": batch}, "missing/batch.safetensors")
except Exception as error:
    print(type(error).__name__)

with SummaryWriter("runs/1") as writer:
    for step in range(3):
        writer.add_scalar("loss", batch.mean() + step, step)
    writer.add_histogram("values", batch, 0)
    writer.add_embedding(batch, tag="rows")
    writer.add_hparams({"lr": 0.1}, {"loss": batch.sum()}, run_name="best")
    writer.add_graph(torch.nn.Linear(2, 3), torch.zeros(1, 2))
print(sorted(os.path.dirname(path) for path in glob.glob("runs/**/events*", recursive=True)), writer.log_dir)
print(sorted(os.listdir("runs/1")))
default = SummaryWriter()
default.close()
print(len(glob.glob("runs/*")), default.log_dir == glob.glob("runs/*_*")[0])

connection = sqlite3.connect("values.db")
connection.execute("create table means (value real)")
connection.execute("insert into means values (?)", (batch.mean().item(),))
connection.commit()
print(connection.execute("select * from means").fetchall())
connection.close()

if os.environ.get("WITH_WANDB"):
    import wandb

    run = wandb.init(project="test", mode="offline", dir=".")
    wandb.log({"loss": batch.mean(), "sum": batch.sum()})
    run.log({"loss": batch.mean()})
    run.summary["best"] = 1.0
    wandb.finish()
    print(len(glob.glob("wandb/offline-run-*")))
print(torch.rand(1).item())
