"""Image classification: the recipes of CIFAR-100, ImageNet and handwritten digits."""
