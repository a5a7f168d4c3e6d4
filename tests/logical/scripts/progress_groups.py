import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


class PatchEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.proj = nn.Conv2d(1, dim, kernel_size=2, stride=2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, dim) * 0.02)

    def forward(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2)
        cls = self.cls_token.expand(x.shape[0], -1, -1)
        return torch.cat([cls, x], dim=1) + self.pos_embed


class ViT(nn.Module):
    def __init__(self, dim=24, depth=2, heads=3, num_classes=10):
        super().__init__()
        self.embed = PatchEmbedding(dim)
        layer = nn.TransformerEncoderLayer(dim, heads, dim * 2, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, x):
        return self.head(self.norm(self.encoder(self.embed(x))[:, 0]))


torch.manual_seed(77)
digits = load_digits()
X = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1).sub_(8).div_(8)
y = torch.tensor(digits.target)
train_loader = DataLoader(TensorDataset(X[:320], y[:320]), batch_size=60, shuffle=True)
val_loader = DataLoader(TensorDataset(X[320:400], y[320:400]), batch_size=80)
model = ViT()
head = [p for n, p in model.named_parameters() if n.startswith("head")]
body = [p for n, p in model.named_parameters() if not n.startswith("head")]
optimizer = torch.optim.AdamW([{"params": body, "lr": 2e-3}, {"params": head, "lr": 1e-2, "weight_decay": 0.0}])
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[4])

for epoch in range(2):
    model.train()
    pbar = tqdm(train_loader, desc=f"Epoch {epoch}")
    norms = []
    for images, target in pbar:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), target)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        scheduler.step()
        pbar.set_postfix(loss=f"{loss.item():.4f}", lr=scheduler.get_last_lr()[0])
    model.eval()
    with torch.no_grad():
        for images, target in tqdm(val_loader, leave=False):
            logits = model(images)
            val_loss = nn.functional.cross_entropy(logits, target)
            val_acc = (logits.argmax(-1) == target).float().mean()
    tqdm.write(
        f"epoch {epoch}: loss {loss.item():.12f} norm {torch.stack(norms).mean().item():.12f} "
        f"val {val_loss.item():.12f} acc {val_acc.item():.6f} lrs {scheduler.get_last_lr()}"
    )
torch.save(model.state_dict(), "vit.pt")
