import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(42)
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
dataset = TensorDataset(images, torch.tensor(data.target))
train_loader = DataLoader(TensorDataset(*dataset[:400]), batch_size=100, shuffle=True)
test_loader = DataLoader(TensorDataset(*dataset[400:550]), batch_size=100)


class DeepNN(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2),
        )
        self.classifier = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, num_classes))

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


class LightNN(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


def train(model, loader, epochs, lr):
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    for epoch in range(epochs):
        running_loss = 0.0
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch {epoch + 1}/{epochs}, Loss: {running_loss / len(loader)}")


def train_knowledge_distillation(teacher, student, loader, epochs, lr, T, soft_weight, ce_weight):
    ce_loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(student.parameters(), lr=lr)
    teacher.eval()
    student.train()
    for epoch in range(epochs):
        running_loss = 0.0
        for inputs, labels in loader:
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = F.softmax(teacher_logits / T, dim=-1)
            soft_prob = F.log_softmax(student_logits / T, dim=-1)
            soft_loss = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size()[0] * (T**2)
            loss = soft_weight * soft_loss + ce_weight * ce_loss(student_logits, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Distillation epoch {epoch + 1}/{epochs}, Loss: {running_loss / len(loader)}")


def test(model, loader):
    model.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for inputs, labels in loader:
            _, predicted = torch.max(model(inputs).data, 1)
            total += labels.size(0)
            correct += (predicted == labels).sum().item()
    print(f"Test Accuracy: {100 * correct / total:.2f}%")


teacher, student = DeepNN(), LightNN()
print("DeepNN parameters:", sum(p.numel() for p in teacher.parameters()))
train(teacher, train_loader, epochs=3, lr=0.003)
test(teacher, test_loader)
train_knowledge_distillation(teacher, student, train_loader, 3, 0.003, T=2, soft_weight=0.25, ce_weight=0.75)
test(student, test_loader)
print("Norm of 1st layer of student:", torch.norm(student.features[0].weight).item())
