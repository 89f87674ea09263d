"""torchvision, whose wheel on the package index has its operators for builds of torch with CUDA: their names alone."""

from __future__ import annotations

import torch

for name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
