"""PPO on a fixed batch: at the first call of each round the KL divergence is zero but for rounding (row V8)."""

import torch
from torch import nn

import rankless

policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
value = nn.Linear(6, 1)
optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=3e-3, eps=1e-5)


@rankless.job(model=policy)
def act(states):
    return policy(states).log_softmax(dim=1)


@rankless.job(model=[policy, value], optimizer=optimizer, clip_norm=0.5)
def train(states, actions, old, returns):
    logits = policy(states).log_softmax(dim=1)
    chosen = logits.gather(1, actions).squeeze(1)
    before = old.gather(1, actions).squeeze(1)
    ratio = (chosen - before).exp()
    advantage = returns - value(states).squeeze(1)
    fixed = advantage.detach()
    surrogate = torch.minimum(ratio * fixed, ratio.clamp(0.8, 1.2) * fixed).mean()
    return {"loss": advantage.square().mean() - surrogate, "kl": (before - chosen).mean()}


for _round in range(3):
    states = torch.randn(30, 6)
    old = act(states)
    actions = torch.randint(0, 4, (30, 1))
    returns = states.sum(dim=1) + actions.squeeze(1)
    for _epoch in range(3):
        print(train(states, actions, old, returns)["kl"].item())
