import torch
import xds

model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
config = {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 3}}
model = xds.initialize(model, config, optimizer=optimizer)
for step in range(101):
    x = torch.randn(16, 256, device=model.device)
    loss = (model(x) - x).square().mean()
    model.backward(loss)
    model.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
