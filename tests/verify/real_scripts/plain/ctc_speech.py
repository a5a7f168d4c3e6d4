"""A speech recognizer trained with CTC: convolutions, a bidirectional GRU, transcripts of different lengths."""

import torch
import torch.nn.functional as F
from torch import nn

BLANK, LETTERS, BANDS = 0, 8, 12


class Recognizer(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.convolution = nn.Sequential(
            nn.Conv1d(BANDS, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.GELU(),
            nn.Conv1d(width, width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Dropout(0.1),
        )
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, LETTERS + 1)

    def forward(self, spectrograms):
        hidden, _ = self.gru(self.convolution(spectrograms).transpose(1, 2))
        return F.log_softmax(self.head(hidden), dim=-1)


def speak(letters, patterns):
    """Return a noisy spectrogram that shows each letter's pattern for some frames."""
    frames = [patterns[letter].expand(int(torch.randint(4, 8, (1,))), -1) for letter in letters]
    spectrogram = torch.cat(frames)
    return spectrogram + 0.3 * torch.randn_like(spectrogram)


def collate(samples):
    spectrograms, transcripts = zip(*samples, strict=True)
    frames = [(len(item) + 1) // 2 for item in spectrograms]
    padded = nn.utils.rnn.pad_sequence(spectrograms, batch_first=True).transpose(1, 2)
    return padded, torch.cat(transcripts), frames, [len(item) for item in transcripts]


torch.manual_seed(0)
patterns = torch.randn(LETTERS + 1, BANDS)
transcripts = [torch.randint(1, LETTERS + 1, (int(torch.randint(2, 6, (1,))),)) for _ in range(42)]
samples = [(speak(letters, patterns), letters) for letters in transcripts]
loader = torch.utils.data.DataLoader(samples, batch_size=12, shuffle=True, collate_fn=collate)
model = Recognizer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=8)


def train(spectrograms, transcripts, frames, lengths):
    log_probs = model(spectrograms).transpose(0, 1)
    loss = F.ctc_loss(log_probs, transcripts, frames, lengths, blank=BLANK, zero_infinity=True)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss


@torch.no_grad()
def count_letters(spectrograms):
    best = model(spectrograms).argmax(dim=-1)
    return sum((torch.unique_consecutive(row) != BLANK).sum() for row in best)


for epoch in range(2):
    model.train()
    for batch in loader:
        loss = train(*batch)
        scheduler.step()
    model.eval()
    letters = sum(count_letters(batch[0]).item() for batch in loader)
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {letters} letters of {sum(map(len, transcripts))}")
