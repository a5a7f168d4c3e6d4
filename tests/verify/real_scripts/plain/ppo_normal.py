"""PPO with a Normal policy for continuous actions on Pendulum, with a state-independent deviation."""

import torch
from torch import nn
from torch.distributions import Normal

ENVIRONMENTS, STEPS = 5, 14


class Pendulum:
    def __init__(self, count):
        self.angle = torch.empty(count).uniform_(-torch.pi, torch.pi)
        self.speed = torch.empty(count).uniform_(-1, 1)

    def observe(self):
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed], dim=1)

    def step(self, action):
        torque = action.squeeze(1).clamp(-2, 2)
        angle = (self.angle + torch.pi) % (2 * torch.pi) - torch.pi
        reward = -(angle**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        self.speed = (self.speed + (15 * self.angle.sin() + 3 * torque) * 0.05).clamp(-8, 8)
        self.angle = self.angle + self.speed * 0.05
        return self.observe(), reward


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor_mean = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor_logstd = nn.Parameter(torch.zeros(1, 1))

    def get_action_and_value(self, states, action=None):
        mean = self.actor_mean(states)
        policy = Normal(mean, self.actor_logstd.expand_as(mean).exp())
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action).sum(1), policy.entropy().sum(1), self.critic(states).squeeze(1)


torch.manual_seed(0)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
environment = Pendulum(ENVIRONMENTS)


@torch.no_grad()
def act(states):
    return agent.get_action_and_value(states)


def train(states, actions, old_log_prob, advantages, returns, old_values):
    _, log_prob, entropy, values = agent.get_action_and_value(states, actions)
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    with torch.no_grad():
        kl = ((ratio - 1) - log_ratio).mean()
        clipped = ((ratio - 1).abs() > 0.2).float().mean()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
    bounded = old_values + torch.clamp(values - old_values, -0.2, 0.2)
    value_loss = 0.5 * torch.max((values - returns) ** 2, (bounded - returns) ** 2).mean()
    loss = policy_loss - 0.001 * entropy.mean() + value_loss * 0.5
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()
    return {"loss": loss, "kl": kl, "clipped": clipped}


state = environment.observe()
for update in range(2):
    optimizer.param_groups[0]["lr"] = 3e-4 * (1 - update / 2)
    rollout = []
    for _step in range(STEPS):
        action, log_prob, _, value = act(state)
        following, reward = environment.step(action)
        rollout.append((state, action, log_prob, value, reward))
        state = following
    states, actions, log_probs, values, rewards = (torch.stack(items) for items in zip(*rollout, strict=True))
    next_value, gae = act(state)[3], torch.zeros(ENVIRONMENTS)
    advantages = torch.zeros_like(rewards)
    for step in reversed(range(STEPS)):
        delta = rewards[step] + 0.99 * next_value - values[step]
        advantages[step] = gae = delta + 0.99 * 0.95 * gae
        next_value = values[step]
    data = [item.flatten(0, 1) for item in (states, actions, log_probs, advantages, advantages + values, values)]
    for _epoch in range(3):
        for rows in torch.randperm(ENVIRONMENTS * STEPS).split(32):
            result = train(*(item[rows] for item in data))
    print(
        f"update {update + 1}: loss {result['loss'].item():.4f}, kl {result['kl'].item():.6f},"
        f" clipped {result['clipped'].item():.3f}, mean reward {rewards.mean().item():.4f}"
    )
