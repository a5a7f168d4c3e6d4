"""Train a small GPT-2 from a configuration, with a loop of our own that keeps the arguments of a Trainer."""

import json
import os
from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup, set_seed


@dataclass
class TrainingArguments:
    output_dir: str = "gpt2-out"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 2
    learning_rate: float = 5e-3
    warmup_steps: int = 2
    max_steps: int = 6
    logging_steps: int = 2
    save_steps: int = 3
    max_grad_norm: float = 1.0
    seed: int = 42


class Counting(Dataset):
    """Arithmetic sequences modulo 29."""

    def __len__(self):
        return 100

    def __getitem__(self, i):
        return {"input_ids": (torch.arange(10) * (1 + i % 5) + i) % 29}


def data_collator(features):
    batch = {"input_ids": torch.stack([f["input_ids"] for f in features])}
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][:, 0] = -100
    return batch


class LoopTrainer:
    def __init__(self, model, args, train_dataset):
        self.model, self.args = model, args
        self.loader = DataLoader(
            train_dataset, args.per_device_train_batch_size, shuffle=True, collate_fn=data_collator, drop_last=True
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.lr_scheduler = get_cosine_schedule_with_warmup(self.optimizer, args.warmup_steps, args.max_steps)
        self.model, self.optimizer = fabric.setup(model, self.optimizer)
        self.loader = fabric.setup_dataloaders(self.loader)
        self.state = {"global_step": 0, "log_history": []}

    def train(self):
        self.model.train()
        tr_loss = torch.tensor(0.0)
        while self.state["global_step"] < self.args.max_steps:
            for step, inputs in enumerate(self.loader):
                loss = self.model(**inputs).loss / self.args.gradient_accumulation_steps
                fabric.backward(loss)
                tr_loss += loss.detach()
                if (step + 1) % self.args.gradient_accumulation_steps:
                    continue
                norm = fabric.clip_gradients(self.model, self.optimizer, max_norm=self.args.max_grad_norm)
                self.optimizer.step()
                self.lr_scheduler.step()
                self.optimizer.zero_grad()
                self.state["global_step"] += 1
                if self.state["global_step"] % self.args.logging_steps == 0:
                    self.log(tr_loss.item() / self.args.logging_steps, norm)
                    tr_loss -= tr_loss
                if self.state["global_step"] % self.args.save_steps == 0:
                    if fabric.is_global_zero:
                        self.save()
                if self.state["global_step"] >= self.args.max_steps:
                    break

    def log(self, loss, norm):
        logs = {"loss": loss, "grad_norm": norm.item(), "learning_rate": self.lr_scheduler.get_last_lr()[0]}
        self.state["log_history"].append({**logs, "step": self.state["global_step"]})
        fabric.print(logs)

    def save(self):
        folder = os.path.join(self.args.output_dir, f"checkpoint-{self.state['global_step']}")
        os.makedirs(folder, exist_ok=True)
        torch.save(self.model.state_dict(), os.path.join(folder, "pytorch_model.bin"))
        with open(os.path.join(folder, "trainer_state.json"), "w") as f:
            json.dump(self.state, f)


args = TrainingArguments()
fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
fabric.launch()
set_seed(args.seed)
model = GPT2LMHeadModel(GPT2Config(vocab_size=29, n_positions=10, n_embd=24, n_layer=2, n_head=2))
trainer = LoopTrainer(model, args, Counting())
trainer.train()
model.eval()
with torch.no_grad():
    tokens = torch.tensor([[3, 5, 7]])
    for _ in range(5):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
fabric.print("continued:", tokens.tolist(), "checksum", sum(p.abs().sum().item() for p in model.parameters()))
