"""Lightning's Fabric and Trainer with DeepSpeedStrategy at stages 1 to 3, and with DDP, on CPU ranks.

It imports nothing of xds. Its last line is JSON, for the test that starts it.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import warnings
from typing import Any

import lightning
import lightning.fabric.strategies.deepspeed as fabric_side
import lightning.pytorch.strategies.deepspeed as trainer_side
import torch
import torch.distributed as dist
from lightning.fabric.accelerators import CPUAccelerator as FabricCPU
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor, nn

NUM_STEPS, ACCUMULATION, WIDTH, LIMIT = 6, 2, 8, 0.05

for module, kind in ((fabric_side, FabricCPU), (trainer_side, CPUAccelerator)):
    module.CUDAAccelerator = kind  # the strategies ask for a CUDA device
    module._validate_device_index_selection = lambda devices: None
warnings.simplefilter("ignore")
logging.getLogger("lightning").setLevel(logging.ERROR)


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))


def batch_of(number: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **more}


def by_fabric(stage: int) -> list[float]:
    """As Fabric's guide writes a loop; stage 0 is DDP."""
    config = config_of(stage, gradient_clipping=LIMIT)
    strategy = FabricDeepSpeed(config=config) if stage else FabricDDP()
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = build()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.02))
    schedule = torch.optim.lr_scheduler.StepLR(
        optimizer if not stage else optimizer.optimizer.optimizer, 2
    )
    losses = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        batch = batch_of(number, fabric.global_rank)
        loss = (model(batch) - batch).square().mean()
        fabric.backward(loss)
        if not stage:
            fabric.clip_gradients(model, optimizer, max_norm=LIMIT)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = (self.inner(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Batches(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        for number in range(NUM_STEPS):
            yield batch_of(number, dist.get_rank())


def by_trainer(stage: int) -> list[float]:
    module = Module()
    config = config_of(stage, train_micro_batch_size_per_gpu=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DeepSpeedStrategy(config=config) if stage else DDPStrategy(),
        max_epochs=2,
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=LIMIT,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=None))
    return module.losses


def own_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("xds-")]


def main() -> None:
    found = {
        name: [run(stage) for stage in range(4)]
        for name, run in (("fabric", by_fabric), ("trainer", by_trainer))
    }
    dist.destroy_process_group()
    deadline = time.monotonic() + 20
    while own_threads() and time.monotonic() < deadline:
        time.sleep(0.1)
    print(json.dumps({**found, "threads": own_threads()}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
