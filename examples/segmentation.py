"""Segmentation: discs on noisy images in each site's own style, with shared or private first layers of a U-Net.

python examples/segmentation.py
"""

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.datamodules import FromArrays
from fl_lightning.methods import FedAvg, FedPer, Local
from fl_lightning.nets import UNet


def images(sites: int = 6, each: int = 6, size: int = 16) -> tuple[Tensor, Tensor, list[int]]:
    """Images with one disc each, their masks and sites; each site has its own brightness and contrast."""
    generator = torch.Generator().manual_seed(0)
    number = sites * each
    centre = 4 + (size - 8) * torch.rand(number, 2, 1, 1, generator=generator)
    radius = 2 + 2 * torch.rand(number, 1, 1, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    masks = ((rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2 < radius**2).long()
    site = torch.arange(number) % sites
    brightness, contrast = torch.linspace(-1, 1, sites)[site], torch.linspace(0.7, 1.5, sites)[site]
    noise = 0.5 * torch.randn(number, size, size, generator=generator)
    return (brightness[:, None, None] + contrast[:, None, None] * masks + noise)[:, None], masks, site.tolist()


def main(rounds: int = 20) -> dict[str, float]:
    """Train three methods; return the mean intersection over union."""
    inputs, masks, sites = images()
    found = {}
    print("method   mean IoU  worst site  MB sent")
    for kind, options in ((Local, {}), (FedAvg, {}), (FedPer, {"personal": ["down.0"]})):
        data = FromArrays(inputs, masks, clients=sites, seed=0)
        torch.manual_seed(0)
        method = kind(UNet(1, 2, (8, 16)), task="Segmentation", optimizer="Adam", lr=0.01, batch_size=4, epochs=3,
                      engine="sequential", seed=0, **options)  # fmt: skip
        trainer = Trainer(max_epochs=rounds, accelerator="cpu", logger=False, enable_checkpointing=False,
                          enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
        trainer.fit(method, data)
        found[kind.__name__] = float(trainer.callback_metrics["val/iou"])
        worst = float(trainer.callback_metrics["val/iou_worst10"])
        print(f"{kind.__name__:<8} {found[kind.__name__]:8.3f} {worst:11.3f} {method.bytes_up / 1e6:8.2f}")
    return found


if __name__ == "__main__":
    main()
