"""An image classifier in the style of DeepSpeed's CIFAR tutorial.

With `import deepspeed` instead of the import below it runs with DeepSpeed.
"""

import argparse
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

import xds.deepspeed as deepspeed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def add_argument():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("-e", "--epochs", default=1, type=int)
    parser.add_argument("--local_rank", type=int, default=-1, help="passed from the launcher")
    parser.add_argument("--output", type=str)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def make_data():
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(64, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (64,), generator=generator)
    return torch.utils.data.TensorDataset(images, labels)


def main(args):
    deepspeed.init_distributed()
    assert args.local_rank == int(os.environ["LOCAL_RANK"])
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()  # rank 0 would download here
    trainset = make_data()
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()

    torch.manual_seed(7)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, optimizer, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset
    )
    local_device = deepspeed.get_accelerator().device_name(model_engine.local_rank)
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _ in range(args.epochs):
        for data in trainloader:
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            outputs = model_engine(inputs)
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
    deepspeed.comm.barrier()
    with open(f"{args.output}.{deepspeed.comm.get_rank()}", "w") as file:
        json.dump({"losses": losses, "lr": optimizer.param_groups[0]["lr"]}, file)


if __name__ == "__main__":
    main(add_argument())
