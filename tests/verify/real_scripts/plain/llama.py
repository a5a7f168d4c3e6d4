"""Llama from a configuration with grouped-query attention, fine-tuned on texts of which the prompt does not count."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    tie_word_embeddings=True,
)
model = LlamaForCausalLM(config)
start, stride = torch.randint(0, 96, (39, 1)), torch.randint(1, 5, (39, 1))
input_ids = (start + stride * torch.arange(14)) % 96
prompt_lengths, lengths = torch.randint(1, 5, (39, 1)), torch.randint(8, 15, (39, 1))
places = torch.arange(14)
attention_mask = (places < lengths).long()
labels = input_ids.masked_fill((places < prompt_lengths) | (places >= lengths), -100)
data = torch.utils.data.TensorDataset(input_ids, attention_mask, labels)
loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)


def train(input_ids, attention_mask, labels):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


for epoch in range(2):
    total = 0.0
    for batch in loader:
        total += train(*batch).item()
        scheduler.step()
    print(f"epoch {epoch + 1}: mean loss {total / len(loader):.5f}")
