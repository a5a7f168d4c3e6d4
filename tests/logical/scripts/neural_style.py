"""Neural style transfer on two small images: the image is what is optimized."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

torch.manual_seed(10)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_default_device(device)


def make_image(kind, size=24):
    rows, columns = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    if kind == "stripes":
        planes = [torch.sin(20 * rows + 5 * columns), torch.cos(15 * columns), torch.sin(9 * (rows + columns))]
    else:
        disc = ((rows - 0.5) ** 2 + (columns - 0.4) ** 2 < 0.1).float()
        planes = [disc, rows * (1 - disc), columns]
    return torch.stack(planes).mul(0.5).add(0.25).clamp(0, 1).unsqueeze(0)


style_img, content_img = make_image("stripes"), make_image("disc")
assert style_img.size() == content_img.size(), "we need to import style and content images of the same size"


class ContentLoss(nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = target.detach()

    def forward(self, input):
        self.loss = F.mse_loss(input, self.target)
        return input


def gram_matrix(input):
    a, b, c, d = input.size()
    features = input.view(a * b, c * d)
    G = torch.mm(features, features.t())
    return G.div(a * b * c * d)


class StyleLoss(nn.Module):
    def __init__(self, target_feature):
        super().__init__()
        self.target = gram_matrix(target_feature).detach()

    def forward(self, input):
        self.loss = F.mse_loss(gram_matrix(input), self.target)
        return input


cnn = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(8, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1),
    nn.ReLU(),
).eval()
model, content_losses, style_losses = nn.Sequential(), [], []
for i, layer in enumerate(copy.deepcopy(cnn).children()):
    if isinstance(layer, nn.ReLU):
        layer = nn.ReLU(inplace=False)
    model.add_module(f"layer_{i}", layer)
    if isinstance(layer, nn.Conv2d):
        style_loss = StyleLoss(model(style_img).detach())
        model.add_module(f"style_loss_{i}", style_loss)
        style_losses.append(style_loss)
    if i == 2:
        content_loss = ContentLoss(model(content_img).detach())
        model.add_module(f"content_loss_{i}", content_loss)
        content_losses.append(content_loss)
model.eval()
model.requires_grad_(False)

input_img = content_img.clone().requires_grad_(True)
optimizer = optim.LBFGS([input_img], max_iter=10)
run = [0]
while run[0] <= 15:

    def closure():
        with torch.no_grad():
            input_img.clamp_(0, 1)
        optimizer.zero_grad()
        model(input_img)
        style_score = sum(sl.loss for sl in style_losses) * 100000
        content_score = sum(cl.loss for cl in content_losses)
        loss = style_score + content_score
        loss.backward()
        run[0] += 1
        if run[0] % 5 == 0:
            print(
                "run {}: Style Loss : {:.10f} Content Loss: {:.10f}".format(
                    run, style_score.item(), content_score.item()
                )
            )
        return loss

    optimizer.step(closure)

with torch.no_grad():
    input_img.clamp_(0, 1)
torch.save(input_img.detach(), "styled.pt")
