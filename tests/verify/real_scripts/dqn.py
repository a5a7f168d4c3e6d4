"""DQN on a grid world: epsilon-greedy actions, a replay buffer, a target network with soft updates, Huber loss."""

import copy
import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

import rankless


class GridWorld:
    size, goal = 5, (4, 4)

    def reset(self):
        self.row, self.column = random.randrange(self.size), random.randrange(self.size)
        return self.observe()

    def observe(self):
        state = torch.zeros(2 * self.size)
        state[self.row] = state[self.size + self.column] = 1.0
        return state

    def step(self, action):
        down, right = [(-1, 0), (1, 0), (0, -1), (0, 1)][action]
        self.row = min(max(self.row + down, 0), self.size - 1)
        self.column = min(max(self.column + right, 0), self.size - 1)
        done = (self.row, self.column) == self.goal
        return self.observe(), 1.0 if done else -0.05, done


random.seed(0)
torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
target = copy.deepcopy(policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, amsgrad=True)
memory = deque(maxlen=200)


@rankless.job(model=policy)
def best_action(state):
    return policy(state.unsqueeze(0)).argmax(dim=1)


@rankless.job(model=[policy, target], optimizer=optimizer, clip_value=100)
def train(states, actions, rewards, following, done):
    values = policy(states).gather(1, actions.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        best = target(following).max(dim=1).values
        expected = rewards + 0.98 * best * (1 - done)
    return F.smooth_l1_loss(values, expected)


environment = GridWorld()
state, total, losses = environment.reset(), 0.0, []
for step in range(40):
    epsilon = max(0.1, 1 - step / 30)
    action = random.randrange(4) if random.random() < epsilon else best_action(state).item()
    following, reward, done = environment.step(action)
    memory.append((state, action, reward, following, float(done)))
    state = environment.reset() if done else following
    total += reward
    if len(memory) >= 24 and step % 2 == 0:
        states, actions, rewards, followings, dones = zip(*random.sample(memory, 21), strict=True)
        loss = train(
            torch.stack(states),
            torch.tensor(actions),
            torch.tensor(rewards),
            torch.stack(followings),
            torch.tensor(dones),
        )
        losses.append(loss.item())
        weights, target_weights = policy.state_dict(), target.state_dict()
        for key in weights:
            target_weights[key] = weights[key] * 0.05 + target_weights[key] * 0.95
        target.load_state_dict(target_weights)
print(f"reward {total:.2f}, mean loss {sum(losses) / len(losses):.6f}, last {losses[-1]:.6f}")
