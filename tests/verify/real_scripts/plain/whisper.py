"""Whisper from a configuration: log-mel spectrograms to padded transcripts, with dropout."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

torch.manual_seed(0)
config = WhisperConfig(
    vocab_size=48,
    num_mel_bins=16,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_source_positions=20,
    max_target_positions=16,
    dropout=0.1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
model = WhisperForConditionalGeneration(config)
lengths = torch.randint(3, 8, (25, 1))
transcripts = torch.randint(3, 48, (25, 8))
labels = transcripts.masked_fill(torch.arange(8) > lengths, -100).masked_fill(torch.arange(8) == lengths, 2)
tones = torch.randn(48, 16)[transcripts].repeat_interleave(5, dim=1).transpose(1, 2)
features = tones + 0.2 * torch.randn(25, 16, 40)
data = torch.utils.data.TensorDataset(features, labels)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(features, labels):
    loss = model(input_features=features, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


model.train()
for epoch in range(2):
    for features, labels in loader:
        loss = train(features, labels)
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
