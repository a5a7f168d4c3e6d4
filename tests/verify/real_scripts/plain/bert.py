"""BERT from a configuration, trained on masked words with padding, a linear warm-up and two parameter groups."""

import torch
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

MASK, WORDS = 3, 96

torch.manual_seed(0)
config = BertConfig(
    vocab_size=WORDS,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=24,
    pad_token_id=0,
)
model = BertForMaskedLM(config)
lengths = torch.randint(6, 17, (42,))
tokens = torch.randint(4, WORDS, (42, 16))
attention_mask = (torch.arange(16) < lengths[:, None]).long()
chosen = (torch.rand(42, 16) < 0.25) & attention_mask.bool()
labels = torch.where(chosen, tokens, -100)
input_ids = torch.where(chosen, MASK, tokens) * attention_mask
data = torch.utils.data.TensorDataset(input_ids, attention_mask, labels)
loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
undecayed = [value for name, value in model.named_parameters() if "LayerNorm" in name or name.endswith("bias")]
decayed = [value for name, value in model.named_parameters() if "LayerNorm" not in name and not name.endswith("bias")]
groups = [{"params": decayed, "weight_decay": 0.01}, {"params": undecayed, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)


def train(input_ids, attention_mask, labels):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


@torch.no_grad()
def count_right(input_ids, attention_mask, labels):
    found = model(input_ids=input_ids, attention_mask=attention_mask).logits.argmax(dim=-1)
    return ((found == labels) & (labels != -100)).sum()


for epoch in range(2):
    model.train()
    for batch in loader:
        loss = train(*batch)
        scheduler.step()
    model.eval()
    right = count_right(input_ids, attention_mask, labels).item()
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {right} of {int(chosen.sum())} words right")
