import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataset import random_split

torch.manual_seed(5)
WORDS = "goal match team coach season stock market bank shares profit court law judge trial vote".split()
vocab = {word: number for number, word in enumerate(["<unk>", *WORDS])}
generator = torch.Generator().manual_seed(1)


def make_sample():
    label = int(torch.randint(3, (), generator=generator))
    count = int(torch.randint(2, 12, (), generator=generator))
    topic = torch.randint(label * 5, label * 5 + 5, (count,), generator=generator)
    noise = torch.randint(len(WORDS), (count,), generator=generator)
    chosen = torch.where(torch.rand(count, generator=generator) < 0.7, topic, noise)
    return label + 1, " ".join(WORDS[number] for number in chosen)


train_iter = [make_sample() for _ in range(200)]
test_iter = [make_sample() for _ in range(60)]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def text_pipeline(text):
    return [vocab.get(word, 0) for word in text.split()]


def label_pipeline(label):
    return int(label) - 1


def collate_batch(batch):
    label_list, text_list, offsets = [], [], [0]
    for _label, _text in batch:
        label_list.append(label_pipeline(_label))
        processed_text = torch.tensor(text_pipeline(_text), dtype=torch.int64)
        text_list.append(processed_text)
        offsets.append(processed_text.size(0))
    label_list = torch.tensor(label_list, dtype=torch.int64)
    offsets = torch.tensor(offsets[:-1]).cumsum(dim=0)
    text_list = torch.cat(text_list)
    return label_list.to(device), text_list.to(device), offsets.to(device)


class TextClassificationModel(nn.Module):
    def __init__(self, vocab_size, embed_dim, num_class):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim, sparse=False)
        self.fc = nn.Linear(embed_dim, num_class)
        self.init_weights()

    def init_weights(self):
        initrange = 0.5
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.fc.weight.data.uniform_(-initrange, initrange)
        self.fc.bias.data.zero_()

    def forward(self, text, offsets):
        embedded = self.embedding(text, offsets)
        return self.fc(embedded)


model = TextClassificationModel(len(vocab), 16, 3).to(device)
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1.0, gamma=0.1)


def train(dataloader):
    model.train()
    total_acc, total_count = 0, 0
    for idx, (label, text, offsets) in enumerate(dataloader):
        optimizer.zero_grad()
        predicted_label = model(text, offsets)
        loss = criterion(predicted_label, label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        total_acc += (predicted_label.argmax(1) == label).sum().item()
        total_count += label.size(0)
        if idx % 5 == 0 and idx > 0:
            accuracy = total_acc / total_count
            print(f"| epoch {epoch:3d} | {idx:5d}/{len(dataloader):5d} | accuracy {accuracy:8.3f} | loss {loss:.12f}")
            total_acc, total_count = 0, 0


def evaluate(dataloader):
    model.eval()
    total_acc, total_count = 0, 0
    with torch.no_grad():
        for label, text, offsets in dataloader:
            predicted_label = model(text, offsets)
            total_acc += (predicted_label.argmax(1) == label).sum().item()
            total_count += label.size(0)
    return total_acc / total_count


num_train = int(len(train_iter) * 0.95)
split_train_, split_valid_ = random_split(train_iter, [num_train, len(train_iter) - num_train])
train_dataloader = DataLoader(split_train_, batch_size=16, shuffle=True, collate_fn=collate_batch)
valid_dataloader = DataLoader(split_valid_, batch_size=16, shuffle=True, collate_fn=collate_batch)
test_dataloader = DataLoader(test_iter, batch_size=16, shuffle=True, collate_fn=collate_batch)
total_accu = None
for epoch in range(1, 4):
    train(train_dataloader)
    accu_val = evaluate(valid_dataloader)
    if total_accu is not None and total_accu > accu_val:
        scheduler.step()
    else:
        total_accu = accu_val
    print(f"| end of epoch {epoch:3d} | valid accuracy {accu_val:8.3f}")
print(f"test accuracy {evaluate(test_dataloader):8.3f}")
