"""Language translation with nn.Transformer, after the tutorial, on made-up sentences."""

import math

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import Transformer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX = 0, 1, 2, 3
NOUNS, VERBS = ["dog", "cat", "bird", "fish"], ["sees", "likes", "finds"]
PAIRS = [(f"the {a} {v} the {b}", f"le {b} {a} {v}") for a in NOUNS for v in VERBS for b in NOUNS]


def build_vocab(sentences):
    tokens = sorted({t for s in sentences for t in s.split()})
    return {t: i for i, t in enumerate(["<unk>", "<pad>", "<bos>", "<eos>", *tokens])}


src_vocab, tgt_vocab = build_vocab(s for s, _ in PAIRS), build_vocab(t for _, t in PAIRS)


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size: int, dropout: float, maxlen: int = 50):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pos_embedding.unsqueeze(-2))

    def forward(self, token_embedding: Tensor):
        return self.dropout(token_embedding + self.pos_embedding[: token_embedding.size(0), :])


class Seq2SeqTransformer(nn.Module):
    def __init__(self, emb_size: int = 16, nhead: int = 2, dim_feedforward: int = 32, dropout: float = 0.1):
        super().__init__()
        self.transformer = Transformer(emb_size, nhead, 1, 1, dim_feedforward, dropout)
        self.generator = nn.Linear(emb_size, len(tgt_vocab))
        self.src_tok_emb = nn.Embedding(len(src_vocab), emb_size)
        self.tgt_tok_emb = nn.Embedding(len(tgt_vocab), emb_size)
        self.positional_encoding = PositionalEncoding(emb_size, dropout=dropout)
        self.emb_size = emb_size

    def forward(self, src, trg, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask, memory_key_padding_mask):
        src_emb = self.positional_encoding(self.src_tok_emb(src.long()) * math.sqrt(self.emb_size))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(trg.long()) * math.sqrt(self.emb_size))
        outs = self.transformer(
            src_emb, tgt_emb, src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask, memory_key_padding_mask
        )
        return self.generator(outs)


def generate_square_subsequent_mask(sz):
    mask = (torch.triu(torch.ones((sz, sz), device=DEVICE)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, float(0.0))


def create_mask(src, tgt):
    tgt_mask = generate_square_subsequent_mask(tgt.shape[0])
    src_mask = torch.zeros((src.shape[0], src.shape[0]), device=DEVICE).type(torch.bool)
    return src_mask, tgt_mask, (src == PAD_IDX).transpose(0, 1), (tgt == PAD_IDX).transpose(0, 1)


def to_tensor(sentence, vocab):
    return torch.tensor([BOS_IDX] + [vocab.get(t, UNK_IDX) for t in sentence.split()] + [EOS_IDX])


def collate_fn(batch):
    src_batch = pad_sequence([to_tensor(s, src_vocab) for s, _ in batch], padding_value=PAD_IDX)
    tgt_batch = pad_sequence([to_tensor(t, tgt_vocab) for _, t in batch], padding_value=PAD_IDX)
    return src_batch, tgt_batch


transformer = Seq2SeqTransformer()
for p in transformer.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
transformer = transformer.to(DEVICE)
loss_fn = torch.nn.CrossEntropyLoss(ignore_index=PAD_IDX)
optimizer = torch.optim.Adam(transformer.parameters(), lr=0.001, betas=(0.9, 0.98), eps=1e-9)


def run_epoch(pairs, train):
    transformer.train(train)
    losses = 0
    for src, tgt in DataLoader(pairs, batch_size=16, collate_fn=collate_fn, shuffle=train):
        src, tgt = src.to(DEVICE), tgt.to(DEVICE)
        tgt_input, tgt_out = tgt[:-1, :], tgt[1:, :]
        src_mask, tgt_mask, src_padding_mask, tgt_padding_mask = create_mask(src, tgt_input)
        logits = transformer(src, tgt_input, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask, src_padding_mask)
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
        if train:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses += loss.item()
    return losses


for epoch in range(1, 3):
    train_loss = run_epoch(PAIRS[:40], True)
    with torch.no_grad():
        val_loss = run_epoch(PAIRS[40:], False)
    print(f"Epoch: {epoch}, Train loss: {train_loss:.12f}, Val loss: {val_loss:.12f}")
torch.save(transformer.state_dict(), "transformer.pt")
