"""A script for `xds --recover` whose ranks hold one copy of the states. The environment says who ends when."""

import json
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import xds
from xds.engine.checkpoint import image, saver
from xds.engine.recovering import LiveRecovery
from xds.recovery import courier
from xds.recovery.slots import versions_folder
from xds.zero.model.update import Updater

RANK, OUT = int(os.environ["RANK"]), Path(os.environ["OUT"])
DEATHS = json.loads(os.environ["DEATHS"])  # [rank, step, where]; step null: whichever it is
CONFIG = json.loads(os.environ["CONFIG"])
HOSTS = json.loads(os.environ.get("HOSTS", "[]"))  # by rank: the host that it pretends to be on
STEPS = 9
SAVES_AFTER = [5, 8] if CONFIG.get("checkpoint") else [5]  # the second is to be whole


class Net(nn.Module):
    """Buffers differ between ranks, forwards draw random numbers, a layer is frozen, and one has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        )
        self.frozen, self.head = nn.Linear(6, 6).requires_grad_(False), self.layers[-1]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        die("forward")
        return nn.functional.cross_entropy(self.layers(self.frozen(x)).float(), y)


class Numbered(torch.utils.data.Dataset):
    """Samples that say that they were taken."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(50, 6), torch.randint(0, 3, (50,))
        self.taken: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.taken.append(number)
        return self.x[number], self.y[number]


engine = None


def dies(where: str) -> bool:
    done = OUT / f"died.{RANK}.{where}"
    if engine is None or done.exists():
        return False
    if not any([RANK, step, where] in DEATHS for step in (engine.global_steps, None)):
        return False
    done.touch()
    return True


def die(where: str) -> None:
    if dies(where):
        os.kill(os.getpid(), signal.SIGKILL)
    if dies(f"host in {where}"):
        lose_hosts(f"host in {where}")


def lose_hosts(where: str) -> None:
    """End all ranks of the hosts that are lost in this step, and remove the memory of these hosts.

    The first rank does it for all of them, as soon as the others have come to this place too.
    """
    lost = [rank for rank, *when in DEATHS if when == [engine.global_steps, where]]
    while RANK != lost[0]:
        time.sleep(1)
    while not all((OUT / f"died.{rank}.{where}").exists() for rank in lost):
        time.sleep(0.01)
    hosts = {HOSTS[rank] for rank in lost}
    for rank, host in enumerate(HOSTS):
        if host in hosts and rank != RANK:
            pid, deadline = int((OUT / f"pid{rank}").read_text()), time.monotonic() + 5
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                while time.monotonic() < deadline:  # until the launcher has noticed it
                    os.kill(pid, 0)
                    time.sleep(0.01)
    for host in hosts:
        shutil.rmtree(versions_folder(RANK).parent.with_name(f"host{host}"))
    os.kill(os.getpid(), signal.SIGKILL)


def patch() -> None:
    write, update = image.rewrite_tensors, Updater.step

    def torn(file, *args):
        sums, path = write(file, *args), file._path
        if dies("copy"):
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        if dies("wrong bit"):
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
        return sums

    def step(self, *args, **kwargs):
        die("norm")  # this rank has the message of the norm
        result = update(self, *args, **kwargs)
        die("updated")
        return result

    image.rewrite_tensors, Updater.step = torn, step
    written = saver.write_image

    def write_slowly(*args):  # in the background
        time.sleep(0.5)
        return written(*args)

    saver.write_image = write_slowly
    enter = LiveRecovery._enter

    def open_groups(self, *args):
        die("group")
        enter(self, *args)

    LiveRecovery._enter = open_groups

    send = courier._send_version

    def send_half(connection, *args):
        where = "give" if threading.current_thread().name == "xds-courier" else "send"
        if dies(where):
            connection.sendall(b"\0\0\0\1")  # of a frame that never comes
            os.kill(os.getpid(), signal.SIGKILL)
        return send(connection, *args)

    courier._send_version = send_half


def main() -> None:
    global engine  # noqa: PLW0603 (deaths ask for its step)
    if HOSTS:
        os.environ["GROUP_RANK"] = str(HOSTS[RANK])
        (OUT / f"pid{RANK}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model, data = Net(), Numbered()
    patch()
    engine = xds.initialize(model, CONFIG, training_data=data)
    loops = CONFIG["zero_optimization"]["stage"] < 3
    with open(OUT / f"rank{RANK}.jsonl", "a") as file:
        while engine.global_steps < STEPS:
            if not loops:
                data.taken.clear()
                engine.train_batch()
                note(file, data)
                continue
            data.taken.clear()
            for batch in engine.training_dataloader:
                before = engine.global_steps
                dtype = next(model.parameters()).dtype
                engine.backward(engine(batch[0].to(dtype), batch[1]))
                engine.step()
                if engine.global_steps <= before:  # it goes on, or a step was dropped
                    is_dropped = engine.micro_steps % 2 == 0
                    if is_dropped:
                        data.taken.clear()
                    continue
                note(file, data)
                data.taken.clear()
                if engine.global_steps in SAVES_AFTER:
                    engine.save_checkpoint(OUT / "saved")
                if engine.global_steps == 2:  # new processes of the script have other values
                    model.frozen.weight.data.mul_(2)
                if engine.global_steps == STEPS:
                    break
        state = engine.full_state_dict(rank0_only=False)
        values = {name: value.tolist() for name, value in state.items()}
        end = {"values": values, "samples": engine.global_samples, "drawn": torch.rand(()).item()}
        file.write(json.dumps({"end": end}) + "\n")


def note(file, data: Numbered) -> None:
    assert engine is not None
    found = {
        "step": engine.global_steps,
        "loss": engine.mean_loss(),
        "samples": data.taken[-4:],
        "lr": engine.get_lr(),
    }
    file.write(json.dumps(found) + "\n")
    file.flush()
    time.sleep(float(os.environ.get("PAUSE", "0")))


if __name__ == "__main__":
    main()
