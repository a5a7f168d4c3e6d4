import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

random.seed(5)
torch.manual_seed(5)
PAD, SOS, EOS, VOCAB = 0, 1, 2, 13


class ReverseDataset(Dataset):
    """Pairs of a sequence of numbers and its reverse."""

    def __init__(self, n):
        self.pairs = []
        for _ in range(n):
            s = [random.randint(3, VOCAB - 1) for _ in range(random.randint(2, 6))]
            self.pairs.append((s, s[::-1] + [EOS]))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


def collate_fn(batch):
    batch.sort(key=lambda pair: len(pair[0]), reverse=True)
    lengths = torch.tensor([len(s) for s, _ in batch])
    src = pad_sequence([torch.tensor(s) for s, _ in batch], padding_value=PAD)
    trg = pad_sequence([torch.tensor([SOS] + t) for _, t in batch], padding_value=PAD)
    return src, lengths, trg


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, bidirectional=True)
        self.fc = nn.Linear(2 * dim, dim)

    def forward(self, src, lengths):
        packed = pack_padded_sequence(self.embedding(src), lengths)
        outputs, hidden = self.rnn(packed)
        outputs, _ = pad_packed_sequence(outputs)
        return outputs, torch.tanh(self.fc(torch.cat([hidden[-2], hidden[-1]], dim=1)))


class Decoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.attn = nn.Linear(3 * dim, 1)
        self.cell = nn.GRUCell(3 * dim, dim)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, token, hidden, encoder_outputs, mask):
        repeated = hidden.unsqueeze(0).expand(encoder_outputs.size(0), -1, -1)
        energy = self.attn(torch.cat([repeated, encoder_outputs], dim=2)).squeeze(2)
        weights = torch.softmax(energy.masked_fill(mask == 0, -1e10), dim=0)
        context = (weights.unsqueeze(2) * encoder_outputs).sum(0)
        hidden = self.cell(torch.cat([self.embedding(token), context], dim=1), hidden)
        return self.out(hidden), hidden


class Seq2Seq(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.encoder, self.decoder = Encoder(dim), Decoder(dim)

    def forward(self, src, lengths, trg, teacher_forcing_ratio=0.5):
        encoder_outputs, hidden = self.encoder(src, lengths)
        mask = src != PAD
        outputs = torch.zeros(trg.shape[0], trg.shape[1], VOCAB)
        token = trg[0]
        for t in range(1, trg.shape[0]):
            output, hidden = self.decoder(token, hidden, encoder_outputs, mask)
            outputs[t] = output
            token = trg[t] if random.random() < teacher_forcing_ratio else output.argmax(1)
        return outputs


def main():
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    train_iter = DataLoader(ReverseDataset(70), batch_size=16, shuffle=True, collate_fn=collate_fn)
    valid_iter = DataLoader(ReverseDataset(20), batch_size=20, collate_fn=collate_fn)
    for epoch in range(2):
        model.train()
        epoch_loss = 0
        for src, lengths, trg in train_iter:
            optimizer.zero_grad()
            output = model(src, lengths, trg)
            loss = criterion(output[1:].view(-1, VOCAB), trg[1:].view(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
            optimizer.step()
            epoch_loss += loss.item()
        model.eval()
        with torch.no_grad():
            for src, lengths, trg in valid_iter:
                output = model(src, lengths, trg, 0)
                valid = criterion(output[1:].view(-1, VOCAB), trg[1:].view(-1))
        print(f"Epoch: {epoch + 1:02} | Train Loss: {epoch_loss / len(train_iter):.12f} | Val. Loss: {valid:.12f}")
    torch.save(model.state_dict(), "seq2seq.pt")


if __name__ == "__main__":
    main()
