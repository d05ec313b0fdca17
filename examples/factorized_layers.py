"""Factorised layers in your own net, trained in a plain PyTorch loop: no federation, fewer parameters.

python examples/factorized_layers.py
"""

import torch
from torch import Tensor, nn

from fl_lightning.datamodules import Digits, Pooled
from fl_lightning.nets import FactorizedConv2d, FactorizedLinear, factorized_layers


class Small(nn.Module):
    """A convolution and a linear layer whose weights are sums of rank-one factors selected by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = FactorizedConv2d(1, 16, kernel_size=3, factors=8)
        self.linear = FactorizedLinear(16 * 3 * 3, 32, factors=12)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        x = nn.functional.max_pool2d(self.conv(x).relu(), 2)
        return self.head(self.linear(x.flatten(1)).relu())


def main(epochs: int = 3) -> tuple[float, float]:
    """Accuracy with all factors, and with half of the linear layer's factors switched off."""
    torch.manual_seed(0)
    net, data = Small(), Pooled(Digits(), batch_size=32)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(epochs):
        for x, y in data.train_dataloader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    whole = accuracy(net, data)
    factorized_layers(net)["linear"].mask[::2] = 0  # WAFFLe's clients each select their own mask
    half = accuracy(net, data)
    print(f"all factors {whole:.3f}, every second one {half:.3f}")
    return whole, half


@torch.no_grad()
def accuracy(net: nn.Module, data: Pooled) -> float:
    """Accuracy on the test samples."""
    right = [(net(x).argmax(1) == y).float() for x, y in data.test_dataloader()]
    return float(torch.cat(right).mean())


if __name__ == "__main__":
    main()
