from math import log10

import torch
import torch.nn as nn
import torch.nn.init as init
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class Upscaled(Dataset):
    def __init__(self, images):
        self.target = torch.tensor(images / 16.0, dtype=torch.float32).unsqueeze(1)

    def __getitem__(self, index):
        target = self.target[index]
        input = nn.functional.avg_pool2d(target.unsqueeze(0), 2).squeeze(0)
        return input, target

    def __len__(self):
        return len(self.target)


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 16, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(16, 16, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(16, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        init.orthogonal_(self.conv1.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv2.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv3.weight)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        return self.pixel_shuffle(self.conv3(x))


torch.manual_seed(123)
device = torch.device("cpu")
images = load_digits().images
training_data_loader = DataLoader(Upscaled(images[:260]), num_workers=0, batch_size=64, shuffle=True)
testing_data_loader = DataLoader(Upscaled(images[260:330]), num_workers=0, batch_size=10, shuffle=False)
model = Net(upscale_factor=2).to(device)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=0.001)


def train(epoch):
    epoch_loss = 0
    for iteration, batch in enumerate(training_data_loader, 1):
        input, target = batch[0].to(device), batch[1].to(device)
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        print("===> Epoch[{}]({}/{}): Loss: {:.12f}".format(epoch, iteration, len(training_data_loader), loss.item()))
    print("===> Epoch {} Complete: Avg. Loss: {:.12f}".format(epoch, epoch_loss / len(training_data_loader)))


def test():
    avg_psnr = 0
    with torch.no_grad():
        for batch in testing_data_loader:
            input, target = batch[0].to(device), batch[1].to(device)
            mse = criterion(model(input), target)
            avg_psnr += 10 * log10(1 / mse.item())
    print("===> Avg. PSNR: {:.12f} dB".format(avg_psnr / len(testing_data_loader)))


for epoch in range(1, 3):
    train(epoch)
    test()
    torch.save(model, "model_epoch_{}.pth".format(epoch))
