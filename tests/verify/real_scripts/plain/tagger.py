"""A part-of-speech tagger: a bidirectional LSTM over packed sequences, sentences of different lengths."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence


class Tagger(nn.Module):
    def __init__(self, words=60, tags=6, width=24):
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, sentences, lengths):
        packed = pack_padded_sequence(self.embedding(sentences), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(hidden)


def collate(samples):
    sentences, tags = zip(*samples, strict=True)
    lengths = torch.tensor([len(sentence) for sentence in sentences])
    padded = pad_sequence(sentences, batch_first=True)
    return padded, lengths, pad_sequence(tags, batch_first=True, padding_value=-100)


torch.manual_seed(0)
sentences = [torch.randint(1, 60, (int(torch.randint(3, 12, (1,))),)) for _ in range(69)]
data = [(sentence, (sentence + F.pad(sentence, (1, 0))[:-1]) % 6) for sentence in sentences]
loader = torch.utils.data.DataLoader(data, batch_size=20, shuffle=True, collate_fn=collate)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def train(sentences, lengths, tags):
    logits = model(sentences, lengths)
    loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@torch.no_grad()
def count_right(sentences, lengths, tags):
    found = model(sentences, lengths).argmax(dim=-1)
    mask = tags != -100
    return (found[mask] == tags[mask]).sum()


for epoch in range(2):
    model.train()
    for batch in loader:
        loss = train(*batch)
    model.eval()
    right = sum(count_right(*batch).item() for batch in loader)
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {right} of {sum(map(len, sentences))} tags right")
