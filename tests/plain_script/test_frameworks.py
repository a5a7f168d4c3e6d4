"""Accelerate, Fabric and Transformers' Trainer see one process and whole batches with `--logical`."""

from pathlib import Path

import pytest
from plain_script.test_single_process import run_logical, run_plain

pytestmark = pytest.mark.slow

START = """
import os
import torch
from torch import nn
from rankless_probe import report

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
rows = torch.utils.data.TensorDataset(torch.randn(46, 4), torch.randint(0, 2, (46,)))
loader = torch.utils.data.DataLoader(rows, 8, shuffle=True)
"""
PROBE = """
import sys

def report(batch):
    # The kind of a batch, on standard error: plain Python has another one.
    print("batch of", type(batch).__name__, file=sys.stderr)
"""
ACCELERATE = (
    START
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
print(accelerator.num_processes, accelerator.process_index, accelerator.distributed_type, type(loader).__name__)
for epoch in range(2):
    for x, y in loader:
        report(x)
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"{loss.item():.10f} {len(x)}")
    print(f"{accelerator.gather_for_metrics(loss).item():.10f}")
accelerator.wait_for_everyone()
accelerator.save_state("state")
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
print(f"{sum(value.sum() for value in torch.load('model.pt').values()).item():.10f}", len(os.listdir("state")))
"""
)
FABRIC = (
    START
    + """
from lightning_fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
print(fabric.world_size, fabric.global_rank, type(loader).__name__)
for epoch in range(2):
    for x, y in loader:
        report(x)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        print(f"{loss.item():.10f}", f"{fabric.all_gather(loss.detach()).item():.10f}")
fabric.save("state.pt", {"model": model, "optimizer": optimizer})
print(f"{sum(value.sum() for value in torch.load('state.pt')['model'].values()).item():.10f}")
"""
)
TRAINER = (
    START
    + """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, TrainerCallback
sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=2)
config = BertConfig(vocab_size=50, max_position_embeddings=16, attn_implementation="eager", **sizes)
rows = [{"input_ids": torch.randint(0, 50, (10,)), "labels": number % 2} for number in range(30)]

def train(resume):
    model = BertForSequenceClassification(config)
    model.register_forward_pre_hook(lambda _, args, inputs: report(inputs["input_ids"]), with_kwargs=True)
    options = dict(report_to=[], use_cpu=True, disable_tqdm=True, seed=3, logging_steps=1, save_steps=3, eval_steps=3)
    options |= dict(per_device_train_batch_size=5, gradient_accumulation_steps=2, eval_strategy="steps", max_steps=6)
    arguments = TrainingArguments("out", lr_scheduler_type="cosine", max_grad_norm=0.5, **options)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:13])
    trainer.train(resume_from_checkpoint=resume)
    print(arguments.world_size, arguments.parallel_mode, trainer.state.global_step)
    for entry in trainer.state.log_history:
        print({name: round(entry[name], 6) for name in ("step", "loss", "eval_loss", "grad_norm") if name in entry})
    return trainer

train(None)
trainer = train("out/checkpoint-3")
loaded = BertForSequenceClassification.from_pretrained("out/checkpoint-6", dtype=torch.float64)
print(round(sum(value.sum() for value in loaded.parameters()).item(), 6))
print(trainer.predict(rows[:7]).predictions.round(6))
"""
)
SCRIPTS = {"accelerate": ACCELERATE, "fabric": FABRIC, "trainer": TRAINER}


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("name", "workers"), [("accelerate", "2"), ("fabric", "3"), ("trainer", "2")])
def test_a_framework_trains_as_on_one_device(name: str, workers: str, tmp_path: Path):
    logical, plain = tmp_path / "logical", tmp_path / "plain"
    for folder in (logical, plain):
        folder.mkdir()
        (folder / "rankless_probe.py").write_text(PROBE)
    (plain / "script.py").write_text(SCRIPTS[name])
    job, expected = run_logical(SCRIPTS[name], logical, workers=workers), run_plain(plain)
    assert job.returncode == 0, job.stderr
    assert expected.returncode == 0, expected.stderr
    assert list_results(job.stdout) == list_results(expected.stdout)
    assert "batch of DividedTensor" in job.stdout
    assert "batch of Tensor" in expected.stderr


def list_results(text: str) -> list[str]:
    """Return the lines of an output with results; the others are bars and times."""
    others = ("batch of", "Writing", "Loading", "[transformers]", "{'loss'", "{'eval_loss'", "{'train_runtime'")
    return [line for line in text.replace("\r", "\n").splitlines() if line and not line.startswith(others)]
