import argparse
from collections import namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical

parser = argparse.ArgumentParser(description="PyTorch actor-critic example")
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--episodes", type=int, default=15)
args = parser.parse_args()

torch.manual_seed(args.seed)
rng = np.random.default_rng(args.seed)
SavedAction = namedtuple("SavedAction", ["log_prob", "value"])


class Walk:
    """A random walk that the agent should hold near the origin."""

    def reset(self):
        self.position, self.speed, self.t = rng.normal(size=2), np.zeros(2), 0
        return self.observe()

    def observe(self):
        return np.concatenate([self.position, self.speed]).astype(np.float32)

    def step(self, action):
        push = np.array([(0.1, 0), (-0.1, 0), (0, 0.1), (0, -0.1)][action])
        self.speed = 0.9 * self.speed + push + 0.01 * rng.normal(size=2)
        self.position, self.t = self.position + self.speed, self.t + 1
        return self.observe(), -float(np.abs(self.position).sum()), self.t >= 25


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 32)
        self.action_head = nn.Linear(32, 4)
        self.value_head = nn.Linear(32, 1)
        self.saved_actions = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


model = Policy()
optimizer = optim.Adam(model.parameters(), lr=3e-2)
eps = np.finfo(np.float32).eps.item()


def select_action(state):
    probs, state_value = model(torch.from_numpy(state).float())
    m = Categorical(probs)
    action = m.sample()
    model.saved_actions.append(SavedAction(m.log_prob(action), state_value))
    return action.item()


def finish_episode():
    R, returns, policy_losses, value_losses = 0, [], [], []
    for r in model.rewards[::-1]:
        R = r + args.gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for (log_prob, value), R in zip(model.saved_actions, returns):
        advantage = R - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]
    return loss.item()


def main():
    env, running_reward = Walk(), -20
    for i_episode in range(args.episodes):
        state, ep_reward, done = env.reset(), 0, False
        while not done:
            action = select_action(state)
            state, reward, done = env.step(action)
            model.rewards.append(reward)
            ep_reward += reward
        running_reward = 0.05 * ep_reward + 0.95 * running_reward
        loss = finish_episode()
        if i_episode % 5 == 0:
            print(f"Episode {i_episode}\tLast reward: {ep_reward:.10f}\tAverage: {running_reward:.10f}\tloss {loss}")
    torch.save(model, "policy.pt")


if __name__ == "__main__":
    main()
