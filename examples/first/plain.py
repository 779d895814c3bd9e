import torch

model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(100):
    x = torch.randn(16, 256)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.4f}")
