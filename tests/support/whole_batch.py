"""Compares DistributedDataParallel on W ranks, batch B / W, with one process, batch B, for each model.

Prints a JSON line: {model: {"off": relative error of the worst gradient, "alike": equal weights on all}}.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "train"))
import quiet  # noqa: F401

# isort: split
import ddp_demos
import elastic
import group
import ladder
import mnist_convnet
import mnist_mlp
import models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18 on STL-10": (lambda: models.build("resnet18"), (3, 96, 96)),
    "resnet18 on CIFAR-10": (lambda: models.build("resnet18"), (3, 32, 32)),
    "digits-net": (lambda: models.build("digits-net"), (1, 8, 8)),
    "mnist_convnet": (mnist_convnet.ConvNet, (1, 28, 28)),
    "mnist_mlp": (mnist_mlp.network, (784,)),
    "ladder": (ladder.network, (20,)),
    "elastic": (elastic.network, (20,)),
    "ddp_demos": (lambda: ddp_demos.Toy(CPU, CPU), (10,)),
}


def criterion(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the model's own program: ten outputs are classes."""
    if outputs.shape[1] == 10:
        return nn.functional.cross_entropy(outputs, labels)
    return nn.functional.mse_loss(outputs, labels[:, None].expand_as(outputs).to(outputs.dtype))


def compare(name: str, world: group.World, *, batch: int, steps: int) -> dict[str, object]:
    """Return the error of the gradients, and whether the weights of all ranks are equal after `steps`."""
    build, shape = MODELS[name]
    torch.manual_seed(world.rank)  # DDP makes the weights equal, not the seed
    net = build().double()
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    random = torch.Generator().manual_seed(7)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    off = 0.0
    for step in range(1 + steps):
        images = torch.randn(batch, *shape, generator=random, dtype=torch.float64)
        labels = torch.randint(0, 10, (batch,), generator=random)
        ddp.train(step > 0)  # in train mode batch norm and dropout couple the images of a batch
        net.zero_grad()
        criterion(ddp(images[world.rank :: world.size]), labels[world.rank :: world.size]).backward()
        if step:
            optimizer.step()
        elif world.rank == 0:
            ours = [parameter.grad.clone() for parameter in net.parameters()]
            whole = torch.autograd.grad(criterion(net(images), labels), list(net.parameters()))
            off = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, whole, strict=True))
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    others = [torch.empty_like(weights) for _ in range(world.size)]
    dist.all_gather(others, weights)
    return {"off": off, "alike": all(torch.equal(weights, other) for other in others)}


def main() -> None:
    """Join the group, compare the models in argv, print the results."""
    steps, *names = sys.argv[1:]
    world = group.find_world()
    group.join(world, device=CPU, timeout_s=120)
    results = {
        name: compare(name, world, batch=2 * world.size if int(steps) else 8, steps=int(steps))
        for name in names or MODELS
    }
    sys.stdout.write(json.dumps(results))
    group.leave()


if __name__ == "__main__":
    main()
