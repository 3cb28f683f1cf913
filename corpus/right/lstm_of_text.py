"""An LSTM reads short texts

kind: right
engine: torch
author: suite
says: A loop over a loader, with an evaluation after each pass.
call: model, data=(TEXT, CLASSES), loss=criterion
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(5, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True, num_layers=2, dropout=0.1)

    def forward(self, text):
        return self.head(self.lstm(self.table(text))[0][:, -1])


torch.manual_seed(1)
TEXT = torch.randint(0, 10, (20, 6))
CLASSES = torch.randint(0, 4, (20,))
model = Model()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
# ---- training ----
for epoch in range(2):
    model.train()
    for inputs, labels in DataLoader(TensorDataset(TEXT, CLASSES), batch_size=4, shuffle=True):
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(TEXT)
    print(epoch, loss.item())
