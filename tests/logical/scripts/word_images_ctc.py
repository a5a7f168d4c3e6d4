import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(3)
CLASSES, STEPS = 11, 12


class Words(Dataset):
    """Images of words: one column of noise and ink per letter, of varying lengths."""

    def __init__(self, count):
        g = torch.Generator().manual_seed(count)
        self.texts = [
            torch.randint(1, CLASSES, (int(torch.randint(2, 6, (1,), generator=g)),), generator=g) for _ in range(count)
        ]
        self.glyphs = torch.randn(CLASSES, 8, generator=g)
        self.noise = torch.randn(count, STEPS, 8, generator=g) * 0.1

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        image = self.noise[i].clone()
        for place, letter in enumerate(self.texts[i]):
            image[2 * place] += self.glyphs[letter]
        return image, self.texts[i]


def collate(samples):
    images, texts = zip(*samples)
    lengths = torch.tensor([len(text) for text in texts])
    return torch.stack(images), nn.utils.rnn.pad_sequence(texts, batch_first=True), lengths


class CRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.rnn = nn.LSTM(16, 12, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x):
        x = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.rnn(x)[0]).log_softmax(-1)


loader = DataLoader(Words(50), batch_size=8, shuffle=True, collate_fn=collate)
model, criterion = CRNN(), nn.CTCLoss(blank=0, zero_infinity=True)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(3):
    total = 0.0
    for images, texts, lengths in loader:
        scores = model(images).permute(1, 0, 2)
        input_lengths = torch.full((images.size(0),), scores.size(0), dtype=torch.long)
        loss = criterion(scores, texts, input_lengths, lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        total += loss.item() * len(images)
    print(f"epoch {epoch} loss {total / 50:.12f}")
with torch.no_grad():
    right = 0
    for images, texts, lengths in DataLoader(Words(20), batch_size=5, collate_fn=collate):
        best = model(images).argmax(-1)
        for row, text, length in zip(best, texts, lengths):
            decoded = [int(k) for k in torch.unique_consecutive(row) if k != 0]
            right += decoded == text[:length].tolist()
    print("words right", right)
