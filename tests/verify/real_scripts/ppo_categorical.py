"""PPO with a Categorical policy on CartPole: rollouts, advantages by GAE, minibatches, an entropy bonus."""

import torch
from torch import nn
from torch.distributions import Categorical

import rankless

ENVIRONMENTS, STEPS = 5, 14


class CartPole:
    """The classic control task, for many carts at once."""

    def __init__(self, count):
        self.state = torch.empty(count, 4).uniform_(-0.05, 0.05)

    def step(self, action):
        _, speed, angle, turn = self.state.unbind(1)
        force = torch.where(action == 1, 10.0, -10.0)
        sine, cosine = angle.sin(), angle.cos()
        push = (force + 0.05 * turn**2 * sine) / 1.1
        spin = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        pull = push - 0.05 * spin * cosine / 1.1
        change = torch.stack([speed, pull, turn, spin], dim=1)
        self.state = self.state + 0.02 * change
        done = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.2095)
        fresh = torch.empty_like(self.state).uniform_(-0.05, 0.05)
        self.state = torch.where(done[:, None], fresh, self.state)
        return self.state, torch.ones(len(done)), done.float()


def layer(inputs, outputs, gain=2**0.5):
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 2, gain=0.01))
        self.critic = nn.Sequential(layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, gain=1.0))

    def forward(self, states, action=None):
        policy = Categorical(logits=self.actor(states))
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.critic(states).squeeze(1)


torch.manual_seed(0)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
environment = CartPole(ENVIRONMENTS)


@rankless.job(model=agent)
def act(states):
    return agent(states)


@rankless.job(model=agent, optimizer=optimizer, clip_norm=0.5)
def train(states, actions, old_log_prob, advantages, returns):
    _, log_prob, entropy, values = agent(states, actions)
    ratio = (log_prob - old_log_prob).exp()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
    value_loss = 0.5 * (values - returns).square().mean()
    loss = policy_loss + 0.5 * value_loss - 0.01 * entropy.mean()
    return {"loss": loss, "entropy": entropy.mean(), "kl": (old_log_prob - log_prob).mean()}


state = environment.state
for update in range(2):
    rollout = []
    for _step in range(STEPS):
        action, log_prob, _, value = act(state)
        following, reward, done = environment.step(action)
        rollout.append((state, action, log_prob, value, reward, done))
        state = following
    states, actions, log_probs, values, rewards, dones = (torch.stack(items) for items in zip(*rollout, strict=True))
    next_value, gae = act(state)[3], torch.zeros(ENVIRONMENTS)
    advantages = torch.zeros_like(rewards)
    for step in reversed(range(STEPS)):
        alive = 1 - dones[step]
        delta = rewards[step] + 0.99 * next_value * alive - values[step]
        advantages[step] = gae = delta + 0.99 * 0.95 * alive * gae
        next_value = values[step]
    returns = advantages + values
    data = [item.flatten(0, 1) for item in (states, actions, log_probs, advantages, returns)]
    for _epoch in range(2):
        for rows in torch.randperm(ENVIRONMENTS * STEPS).split(32):
            result = train(*(item[rows] for item in data))
    print(
        f"update {update + 1}: loss {result['loss'].item():.5f}, entropy {result['entropy'].item():.5f},"
        f" kl {result['kl'].item():.5f}, mean value {values.mean().item():.5f}"
    )
