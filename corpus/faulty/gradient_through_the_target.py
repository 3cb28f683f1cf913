"""The gradient flows through the target of a Q-network

kind: faulty
engine: torch
author: third
changes: update
quantity: LOSS_FORM
says: No target network and no no_grad/detach: gradient flows through the target.
call: none
"""
import random
from collections import deque, namedtuple

import torch
import torch.nn as nn
import torch.optim as optim

Transition = namedtuple("Transition", "state action reward next_state done")


class Replay:
    def __init__(self, cap):
        self.mem = deque([], maxlen=cap)

    def push(self, *a):
        self.mem.append(Transition(*a))

    def sample(self, n):
        return Transition(*zip(*random.sample(self.mem, n)))

    def __len__(self):
        return len(self.mem)


class QNet(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.l1 = nn.Linear(n_obs, 32)
        self.l2 = nn.Linear(32, n_act)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x)))


class Agent:
    def __init__(self, n_obs=3, n_act=2, gamma=0.95, lr=1e-3, bs=16):
        self.q_eval = QNet(n_obs, n_act)
        self.optimizer = optim.Adam(self.q_eval.parameters(), lr=lr)
        self.loss = nn.MSELoss()
        self.memory = Replay(500)
        self.gamma, self.bs, self.n_act = gamma, bs, n_act
        self.eps = 1.0

    def choose(self, s):
        if random.random() < self.eps:
            return random.randrange(self.n_act)
        with torch.no_grad():
            return int(self.q_eval(s).argmax())

    def learn(self):
        if len(self.memory) < self.bs:
            return None
        b = self.memory.sample(self.bs)
        s, s2 = torch.stack(b.state), torch.stack(b.next_state)
        a = torch.tensor(b.action)
        r = torch.tensor(b.reward)
        d = torch.tensor(b.done)
        idx = torch.arange(self.bs)
        q_pred = self.q_eval(s)[idx, a]
        q_next = self.q_eval(s2)  # fault
        q_next[d] = 0.0
        q_target = r + self.gamma * q_next.max(dim=1)[0]  # fault
        loss = self.loss(q_pred, q_target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.eps = max(0.05, self.eps * 0.98)
        return loss.item()


random.seed(0)
torch.manual_seed(0)
agent = Agent()
losses = []
# ---- training ----
for episode in range(3):
    s = torch.randn(3)
    for t in range(15):
        a = agent.choose(s)
        s2 = 0.8 * s + 0.3 * torch.randn(3) + (0.1 if a else -0.1)
        r = -float(s2.abs().sum())
        agent.memory.push(s, a, r, s2, t == 14)
        l = agent.learn()
        if l is not None:
            losses.append(l)
        s = s2
    print(episode, losses[-1] if losses else None)
