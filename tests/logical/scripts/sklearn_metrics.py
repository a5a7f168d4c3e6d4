import numpy as np
import torch
from sklearn.datasets import load_wine
from sklearn.metrics import classification_report, confusion_matrix, f1_score, roc_auc_score
from sklearn.model_selection import train_test_split
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset


class WineDataset(Dataset):
    def __init__(self, X, y):
        self.X = torch.tensor(X, dtype=torch.float32)
        self.y = torch.tensor(y, dtype=torch.long)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, idx):
        return {"features": self.X[idx], "label": self.y[idx]}


np.random.seed(3)
torch.manual_seed(3)
X, y = load_wine(return_X_y=True)
X = (X - X.mean(axis=0)) / X.std(axis=0)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.35, random_state=1)
train_dl = DataLoader(WineDataset(X_train, y_train), batch_size=32, shuffle=True)
test_dl = DataLoader(WineDataset(X_test, y_test), batch_size=20)

model = nn.Sequential(nn.Linear(13, 24), nn.ELU(), nn.Linear(24, 3))
optimizer = optim.AdamW(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()
for epoch in range(4):
    model.train()
    all_preds, all_labels = [], []
    for batch in train_dl:
        out = model(batch["features"])
        loss = criterion(out, batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        all_preds.extend(out.argmax(dim=1).cpu().numpy())
        all_labels.extend(batch["label"].cpu().numpy())
    print(
        f"epoch {epoch} last loss {loss.item():.12f} train F1 {f1_score(all_labels, all_preds, average='macro'):.10f}"
    )

model.eval()
probs, preds, labels = [], [], []
with torch.no_grad():
    for batch in test_dl:
        p = torch.softmax(model(batch["features"]), dim=1)
        probs.append(p.detach().cpu().numpy())
        preds += p.argmax(1).tolist()
        labels += batch["label"].tolist()
probs = np.concatenate(probs)
print(confusion_matrix(labels, preds))
print(classification_report(labels, preds, digits=6))
print("AUC", roc_auc_score(labels, probs, multi_class="ovr"))
np.save("probs.npy", probs)
