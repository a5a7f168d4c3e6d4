"""T5 from a configuration, trained to sort numbers: encoder and decoder with dropout, padded labels."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
config = T5Config(
    vocab_size=40,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    dropout_rate=0.1,
    feed_forward_proj="gated-gelu",
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config)
lengths = torch.randint(3, 9, (33, 1))
input_ids = torch.randint(2, 40, (33, 8)).masked_fill(torch.arange(8) >= lengths, 0)
in_order = input_ids.masked_fill(input_ids == 0, 99).sort(dim=1).values
labels = torch.cat([in_order.masked_fill(in_order == 99, -100), torch.full((33, 1), -100)], dim=1)
labels = labels.scatter(1, lengths, 1)
data = torch.utils.data.TensorDataset(input_ids, labels)
loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True)
optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)


def train(input_ids, labels):
    loss = model(input_ids=input_ids, attention_mask=(input_ids != 0).long(), labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@torch.no_grad()
def evaluate(input_ids, labels):
    output = model(input_ids=input_ids, attention_mask=(input_ids != 0).long(), labels=labels)
    return output.loss, (output.logits.argmax(dim=-1) == labels).sum()


for epoch in range(2):
    model.train()
    for batch in loader:
        train(*batch)
    model.eval()
    loss, right = evaluate(input_ids, labels)
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {right.item()} of {int((labels != -100).sum())} right")
