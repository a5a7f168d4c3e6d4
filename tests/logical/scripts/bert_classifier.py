import random

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

seed_val = 42
random.seed(seed_val)
np.random.seed(seed_val)
torch.manual_seed(seed_val)

CLS, SEP, VOCAB, MAX_LEN = 1, 2, 40, 12
input_ids, attention_masks, labels = [], [], []
for _ in range(90):
    n = random.randint(4, MAX_LEN - 2)
    body = [random.randint(3, VOCAB - 1) for _ in range(n)]
    ids = [CLS, *body, SEP]
    input_ids.append(ids + [0] * (MAX_LEN - len(ids)))
    attention_masks.append([1] * len(ids) + [0] * (MAX_LEN - len(ids)))
    labels.append(int(sum(b % 2 for b in body) * 2 > n))
dataset = TensorDataset(torch.tensor(input_ids), torch.tensor(attention_masks), torch.tensor(labels))
train_dataset, val_dataset = torch.utils.data.random_split(dataset, [70, 20])
train_dataloader = DataLoader(train_dataset, sampler=RandomSampler(train_dataset), batch_size=16)
validation_dataloader = DataLoader(val_dataset, sampler=SequentialSampler(val_dataset), batch_size=16)

config = BertConfig(
    vocab_size=VOCAB,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=MAX_LEN,
    num_labels=2,
)
model = BertForSequenceClassification(config)
no_decay = ["bias", "LayerNorm.weight"]
optimizer_grouped_parameters = [
    {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=2e-3, eps=1e-8)
epochs = 2
total_steps = len(train_dataloader) * epochs
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=total_steps)
device = torch.device("cpu")
model.to(device)


def flat_accuracy(preds, labels):
    return np.sum(np.argmax(preds, axis=1).flatten() == labels.flatten()) / len(labels.flatten())


for epoch_i in range(epochs):
    print("======== Epoch {:} / {:} ========".format(epoch_i + 1, epochs))
    total_train_loss = 0
    model.train()
    for step, batch in enumerate(train_dataloader):
        b_input_ids, b_input_mask, b_labels = (t.to(device) for t in batch)
        model.zero_grad()
        result = model(b_input_ids, attention_mask=b_input_mask, labels=b_labels, return_dict=True)
        loss = result.loss
        total_train_loss += loss.item()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    print("  Average training loss: {0:.12f}".format(total_train_loss / len(train_dataloader)))
    model.eval()
    total_eval_accuracy, total_eval_loss = 0, 0
    for batch in validation_dataloader:
        b_input_ids, b_input_mask, b_labels = (t.to(device) for t in batch)
        with torch.no_grad():
            result = model(b_input_ids, attention_mask=b_input_mask, labels=b_labels, return_dict=True)
        total_eval_loss += result.loss.item()
        logits = result.logits.detach().cpu().numpy()
        total_eval_accuracy += flat_accuracy(logits, b_labels.to("cpu").numpy())
    print("  Accuracy: {0:.6f}".format(total_eval_accuracy / len(validation_dataloader)))
    print("  Validation Loss: {0:.12f}".format(total_eval_loss / len(validation_dataloader)))
torch.save(model.state_dict(), "bert.bin")
