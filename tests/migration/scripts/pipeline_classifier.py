"""An AlexNet as a list of layers in pipeline stages, in the style of DeepSpeed's pipeline tutorial.

With `import deepspeed` instead of the imports below it runs with DeepSpeed.
"""

import argparse
import json

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import xds.deepspeed as deepspeed
from xds.deepspeed.pipe import PipelineModule
from xds.deepspeed.utils import RepeatingLoader


class AlexNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, kernel_size=5, stride=2, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((4, 4))
        self.classifier = nn.Sequential(
            nn.Dropout(p=0.0),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(inplace=True),
            nn.Linear(64, num_classes),
        )

    def forward(self, x):
        x = torch.flatten(self.avgpool(self.features(x)), 1)
        return self.classifier(x)


def join_layers(model):
    return [
        *model.features,
        model.avgpool,
        lambda x: torch.flatten(x, 1),
        *model.classifier,
    ]


def get_args():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("-s", "--steps", type=int, default=4)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1138)
    parser.add_argument("--output", type=str)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def make_data():
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(64, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (64,), generator=generator)
    return TensorDataset(images, labels)


def main():
    args = get_args()
    deepspeed.init_distributed()
    deepspeed.runtime.utils.set_random_seed(args.seed)
    net = PipelineModule(
        layers=join_layers(AlexNet()),
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method="parameters",
        activation_checkpoint_interval=0,
    )
    trainset = make_data()
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=trainset,
    )
    losses = []
    for step in range(args.steps):
        loss = engine.train_batch()
        losses.append(loss.item())
        assert engine.agg_train_loss.item() == loss.item()
        if step == 0:
            engine.mem_status("after the first step", print_rank=0)
    engine.set_dataiterator(iter(RepeatingLoader(DataLoader(trainset, 8))))
    losses.append(engine.train_batch().item())
    samples = iter(DataLoader(trainset, 8))
    loss, logits = engine.eval_batch(samples, return_logits=True, num_micro_batches=1)
    if engine.global_rank == 0:
        found = {"losses": losses, "eval": loss.item(), "stages": engine.num_stages}
        with open(args.output, "w") as file:
            json.dump(found, file)
    if engine.is_last_stage():
        assert logits.shape == (8, 10)
        assert engine.total_loss is not None
    else:
        assert logits is None


if __name__ == "__main__":
    main()
